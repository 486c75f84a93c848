"""Slurm's srun. Its manual page is the source of every option: https://slurm.schedmd.com/srun.html"""

from __future__ import annotations

from phalanx.launch.start.command import HostCommand, StartRequest, node_words, processes_per_node


def command(request: StartRequest) -> HostCommand:
    """Returns the srun of the job."""
    grid, per_node = request.grid, processes_per_node(request)
    options = [f"--nodes={grid.nodes}", f"--ntasks={grid.nodes * per_node}", f"--ntasks-per-node={per_node}"]
    if request.hosts:
        options.append(f"--nodelist={','.join(request.hosts)}")
    # sbatch --export=NAMES would otherwise hold for the steps, too.
    options += ["--export=ALL", "--input=none"]
    options += ["--overlap"] if request.in_step else []
    options += _binding(request)
    options += _ends(request)
    return HostCommand(("srun", *options, *request.extra, *node_words(request)), request.hosts)


def _binding(request: StartRequest) -> list[str]:
    # A task that starts the ranks of its node must see all processors; by default it gets one.
    options = [f"--cpu-bind={request.cpu_bind or 'none'}"]
    if request.ranks_by == "launcher" and request.cpus_per_rank:
        options.append(f"--cpus-per-task={request.cpus_per_rank}")
    # A rank chooses its device by its local rank among all of the node.
    return [*options, "--gpu-bind=none"] if request.devices else options


def _ends(request: StartRequest) -> list[str]:
    """Returns what happens when a task ends. The others are never killed at once: ranks that stop with a checkpoint
    end one after the other."""
    if request.grid.least_nodes < request.grid.nodes:
        return ["--no-kill", "--kill-on-bad-exit=0", "--wait=0"]
    return ["--kill-on-bad-exit=0", f"--wait={round(request.grace_s) + 30}"]
