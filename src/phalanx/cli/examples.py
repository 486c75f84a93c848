"""Two examples of every verb that takes a job, for its help page."""

EXAMPLES: dict[str, tuple[tuple[str, str], tuple[str, str]]] = {
    "train": (
        ("train examples/main.yaml", "two processes on this machine, a few minutes"),
        ("train job.yaml layout=auto --steps 50", "in the layout that the planner chooses"),
    ),
    "launch": (
        ("launch job.yaml --nnodes 2", "here: inside an allocation, or on this machine"),
        ("launch job.yaml --submit slurm -N 2 -t 2h --dry-run", "show the batch script"),
    ),
    "verify": (
        ("verify examples/main.yaml", "every technique against one process, about a minute"),
        ("verify job.yaml --layouts tp=2,sp=true dp_shard=4", "these layouts alone"),
    ),
    "data prepare": (
        ("data prepare examples/main.yaml", "the corpus of a job"),
        ("data prepare data=text data.path=book.txt tokenizer=bpe", "your own text"),
    ),
    "plan": (
        ("plan model=llama3-8b cluster=dgx-h100:1 global_batch=64", "on a machine that you do not have"),
        ("plan job.yaml --html plan.html", "with pictures"),
    ),
    "predict": (
        ("predict model=llama3-8b cluster=dgx-h100 dp_shard=8 global_batch=16", "one layout"),
        ("predict job.yaml --svg step.svg", "with a picture"),
    ),
    "simulate": (
        ("simulate examples/pipeline.yaml cluster=local --svg step.svg", "as a picture"),
        ("simulate job.yaml --straggler 2=1.2", "with a device that takes 1.2 × as long"),
    ),
    "doctor": (
        ("doctor examples/main.yaml", "this machine, for this job"),
        ("doctor --hosts node-a node-b", "compare two hosts through ssh"),
    ),
    "test-dist": (
        ("test-dist --nproc-per-node 4 --html test.html", "four ranks of this machine"),
        ("test-dist job.yaml --quick", "the ranks of a job"),
    ),
}
"""Words after `phalanx`, and what they do."""
