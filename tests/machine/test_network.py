"""Checks of the allocation, the launcher and the network."""

from __future__ import annotations

import socket
import time

import pytest

from machine.machines import machine, only, program, statuses, write
from phalanx.machine import network
from phalanx.machine.checks import CHECKS, run
from phalanx.machine.network import launcher, scheduler

# The allocation and the launcher's variables.


NOW = 1_000_000.0
SLURM = {"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
RANK = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"PATH": ""}, "no allocation"),
        (SLURM | {"PATH": ""}, "Slurm job 77, 2 nodes: n[1-2]; time left not known"),
        (SLURM | {"SLURM_JOB_END_TIME": "1007200"}, "Slurm job 77, 2 nodes: n[1-2]; 2h00m left"),
        ({"LSB_JOBID": "5", "LSB_HOSTS": "a a b"}, "LSF job 5 on a, b"),
        ({"FLUX_JOB_ID": "f1"}, "Flux job f1"),
        ({"KUBERNETES_SERVICE_HOST": "x", "JOB_COMPLETION_INDEX": "1"}, "a Kubernetes pod, index 1 of an Indexed Job"),
    ],
)
def test_the_allocation_is_named(env, text):
    assert only(scheduler(machine(env=env), NOW), "OK").text == text


def test_a_login_node_is_named(tmp_path):
    program(tmp_path / "bin", "qsub", "")
    assert "a login node of PBS" in only(scheduler(machine(env={"PATH": str(tmp_path / "bin")}), NOW), "OK").text


@pytest.mark.parametrize(("left", "status"), [(300, "WARN"), (20, "ERROR"), (-5, "ERROR")])
def test_an_allocation_that_ends_soon(left, status):
    found = scheduler(machine(env=SLURM | {"SLURM_JOB_END_TIME": str(int(NOW) + left)}), NOW)
    assert " left" in only(found, status).text


@pytest.mark.parametrize(
    ("told", "text"),
    [("4:59", "4m59s left"), ("1-02:03:04", "26h03m left"), ("UNLIMITED", "not known"), ("", "not known")],
)
def test_an_older_slurm_is_asked(tmp_path, told, text):
    program(tmp_path / "bin", "squeue", f"print({told!r})")
    [line] = scheduler(machine(env=SLURM | {"PATH": str(tmp_path / "bin")}), NOW)
    assert text in line.text


def test_the_node_file_of_pbs(tmp_path):
    (tmp_path / "nodes").write_text("a\na\nb\n")
    env = {"PBS_JOBID": "9.pbs", "PBS_NODEFILE": str(tmp_path / "nodes")}
    assert only(scheduler(machine(env=env), NOW), "OK").text == "PBS job 9.pbs, 2 nodes: a, b"
    env["PBS_NODEFILE"] = str(tmp_path / "gone")
    assert "cannot be read" in only(scheduler(machine(env=env), NOW), "WARN").text


def test_a_node_list_that_is_none():
    line = only(scheduler(machine(env=SLURM | {"SLURM_JOB_NODELIST": "n[1-"}), NOW), "ERROR")
    assert "SLURM_JOB_NODELIST is not a list of hosts" in line.text
    assert line.remedy


def test_the_launcher_is_named():
    assert "starts its own processes" in only(launcher(machine()), "OK").text
    assert only(launcher(machine(env=RANK | ADDRESS)), "OK").text == "torchrun: 2 ranks, 2 on this node, node 0"


@pytest.mark.parametrize(
    ("env", "text"),
    [
        (RANK, "incompletely: MASTER_ADDR, MASTER_PORT not set"),
        (
            {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
            | {"SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"},
            "Two launchers claim this process",
        ),
        ({"SLURM_NTASKS": "4"}, "not started with srun"),
        ({"PHALANX_LOG_DIR": "/tmp/old"}, "PHALANX_LOG_DIR set"),
    ],
)
def test_variables_that_contradict_each_other(env, text):
    assert text in only(launcher(machine(env=env)), "ERROR").text


def test_a_world_that_differs_from_the_layout():
    found = list(launcher(machine(env=RANK | ADDRESS, job="model=tiny --tp 4")))
    assert statuses(found) == "OK ERROR"
    assert "torchrun started 2 ranks, but the layout tp=4 has 4" in found[1].text
    assert statuses(launcher(machine(env=RANK | ADDRESS, job="model=tiny --tp 2"))) == "OK"


# Names, interfaces, ports and the rendezvous.


TWO_NODES = "model=tiny --dp-replicate 2 global_batch=8 run.nnodes=2 run.rdzv_endpoint={}"
CARDS = {"lo": "127.0.0.1", "eth0": "127.0.0.2", "ib0": "127.0.0.3"}


def answers(*addresses):
    return lambda *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]


def fails(*_, **__):
    raise socket.gaierror(-2, "Name or service not known")


def test_a_host_that_knows_its_name():
    assert only(network.host_name(machine(resolve=answers("10.0.0.1")), "node"), "OK").text == "node is 10.0.0.1"


def test_a_host_that_does_not():
    assert "/etc/hosts" in only(network.host_name(machine(resolve=fails), "node"), "WARN").remedy


def test_a_name_that_other_nodes_cannot_use():
    alone = machine(resolve=answers("127.0.1.1"))
    assert only(network.host_name(alone, "node"), "OK")
    several = machine(resolve=answers("127.0.1.1"), job=TWO_NODES.format("a:29400"))
    assert "GLOO_SOCKET_IFNAME" in only(network.host_name(several, "node"), "WARN").remedy


def test_a_name_server_that_hangs_does_not_hang_the_report(monkeypatch):
    def hangs(*_, **__):
        time.sleep(3)
        return []

    checks = [check for check in CHECKS if check.name == "host name"]
    began = time.monotonic()
    line = only(run(checks, machine(resolve=hangs, seconds=0.2)), "ERROR")
    assert time.monotonic() - began < 2
    assert "name server" in line.remedy


def test_a_slow_name_server_is_named(monkeypatch):
    times = iter([0.0, 5.0])
    monkeypatch.setattr(network.time, "monotonic", lambda: next(times))
    assert "after 5.0s" in only(network.host_name(machine(resolve=answers("10.0.0.1")), "node"), "WARN").text


def test_loopback(monkeypatch):
    assert only(network.loopback(machine()), "OK")

    def down(*_, **__):
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(socket, "create_server", down)
    assert only(network.loopback(machine()), "ERROR").remedy == "ip link set lo up"


@pytest.mark.parametrize(
    ("variable", "value", "status"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", "OK"),
        ("GLOO_SOCKET_IFNAME", "eth0,ib0", "OK"),
        ("GLOO_SOCKET_IFNAME", "eth0,eth7", "ERROR"),
        ("GLOO_SOCKET_IFNAME", "eth", "ERROR"),
        ("NCCL_SOCKET_IFNAME", "eth", "OK"),
        ("NCCL_SOCKET_IFNAME", "=eth0", "OK"),
        ("NCCL_SOCKET_IFNAME", "=eth", "ERROR"),
        ("NCCL_SOCKET_IFNAME", "^lo,docker", "OK"),
        ("NCCL_SOCKET_IFNAME", "^lo,eth,ib", "ERROR"),
        ("NCCL_SOCKET_IFNAME", "hsn", "ERROR"),
        ("TP_SOCKET_IFNAME", "wlan0", "ERROR"),
    ],
)
def test_interfaces_named_by_variables(variable, value, status):
    assert only(network.interface(machine(env={variable: value}), lambda: CARDS), status)


def test_an_interface_whose_listener_is_not_reached():
    elsewhere = {"lo": "127.0.0.1", "eth0": "192.0.2.200"}  # an address that this machine does not own
    found = machine(env={"GLOO_SOCKET_IFNAME": "eth0"}, job=TWO_NODES.format("a:29400"))
    assert "a listener there is not reached" in only(network.interface(found, lambda: elsewhere), "ERROR").text


def test_ports(tmp_path):
    assert only(network.ports(machine(tmp_path)), "OK")
    assert only(network.ports(machine(tmp_path, env={"MASTER_PORT": "29500"})), "OK")
    assert "it may be taken" in only(network.ports(machine(tmp_path, env={"MASTER_PORT": "40000"})), "WARN").text
    assert only(network.ports(machine(tmp_path, env={"MASTER_PORT": "99999"})), "ERROR")
    write(tmp_path, "/proc/sys/net/ipv4/ip_local_port_range", "40000\t40100\n")
    assert only(network.ports(machine(tmp_path)), "WARN")


def at(host, port=29400, **fields):
    return machine(env={"MASTER_ADDR": host, "MASTER_PORT": str(port)}, **fields)


def test_without_an_address_there_is_no_rendezvous():
    assert list(network.rendezvous(machine())) == []


def test_the_rendezvous_is_looked_up_and_tried():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert "another program listens" in only(network.rendezvous(at("127.0.0.1", port)), "ERROR").text
    assert "an address of this machine" in only(network.rendezvous(at("127.0.0.1", port)), "OK").text
    assert only(network.rendezvous(at("nowhere", resolve=fails)), "ERROR")


@pytest.mark.parametrize(("answer", "status"), [("", "OK"), ("refused", "OK"), ("no answer within 3 s", "ERROR")])
def test_a_rendezvous_on_another_host(monkeypatch, answer, status):
    monkeypatch.setattr(network, "_connect", lambda *_: answer)
    assert only(network.rendezvous(at("far", resolve=answers("192.0.2.200"))), status)
