"""GPUs, by a stand-in for nvidia-smi and for what torch says."""

import time

import pytest

from machine.machines import PATH, machine, only, program, statuses, with_torch
from phalanx.machine.system import gpus

GPU = "NVIDIA A100-SXM4-80GB, 550.54.15, 81920, 500, {mig}, {persistence}, {mode}, {ecc}\n"
FINE = {"mig": "Disabled", "persistence": "Enabled", "mode": "Default", "ecc": "0"}
SMI = """
import sys
if any(word.startswith("--query-gpu") for word in sys.argv):
    print({csv!r}, end="")
else:
    print("| NVIDIA-SMI 550.54.15   Driver Version: 550.54.15   CUDA Version: 12.4 |")
"""
TWO = {"available": True, "cuda": "12.4", "nccl": True, "devices": ["A100"] * 2, "memory": [80 * 2**30] * 2}


@pytest.fixture
def with_driver(tmp_path):
    """`with_driver(csv, env=..., job=..., **facts of torch)`: a machine whose nvidia-smi prints this."""

    def made(csv, env=None, job="", **facts):
        program(tmp_path / "bin", "nvidia-smi", SMI.format(csv=csv))
        path = f"{tmp_path / 'bin'}:{PATH}"
        return with_torch(machine(tmp_path, env={"PATH": path} | (env or {}), job=job), **facts)

    return made


def line(**changed):
    return GPU.format(**FINE | changed)


def test_no_gpu(tmp_path):
    assert "on the CPU" in only(gpus(machine(tmp_path, env={"PATH": ""})), "OK").text


def test_a_job_for_gpus_without_one(tmp_path):
    found = with_torch(machine(tmp_path, env={"PATH": ""}, job="model=tiny cluster.device=cuda"))
    assert "no GPU" in only(gpus(found), "ERROR").text


def test_gpus_without_nvidia_smi(tmp_path):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    found = list(gpus(with_torch(machine(tmp_path, env={"PATH": ""}), **TWO)))
    assert statuses(found) == "WARN OK"
    assert found[0].remedy == "add it to PATH"


def test_two_gpus(with_driver):
    text = only(gpus(with_driver(line() * 2, **TWO)), "OK").text
    assert text == "2 × NVIDIA A100-SXM4-80GB, driver 550.54.15, CUDA 12.4; torch sees 2"


@pytest.mark.parametrize(
    ("changed", "status", "text"),
    [
        ({"ecc": "3"}, "ERROR", "GPU 0 has 3 uncorrected memory errors"),
        ({"mode": "Prohibited"}, "ERROR", "compute mode Prohibited"),
        ({"persistence": "Disabled"}, "WARN", "persistence mode"),
        ({"mig": "Enabled"}, "WARN", "partitioned (MIG)"),
        ({"mig": "[N/A]", "ecc": "[N/A]", "persistence": "[Not Supported]"}, "", ""),
    ],
)
def test_faults_that_the_driver_shows(with_driver, changed, status, text):
    found = list(gpus(with_driver(line(**changed) + line(), **TWO)))
    assert statuses(found) == f"{status} OK".strip()
    assert text in found[0].text


def test_memory_that_somebody_uses(with_driver):
    found = list(gpus(with_driver(line().replace(" 500,", " 60000,") + line(), **TWO)))
    assert statuses(found) == "WARN OK"
    assert "GPU 0: 60,000MiB in use" in found[0].text


@pytest.mark.parametrize(
    ("facts", "status", "text"),
    [
        ({"cuda": None}, "ERROR", "has no CUDA"),
        ({"cuda": "13.0"}, "ERROR", "supports CUDA 12.4, torch is built for 13.0"),
        ({"cuda": "12.1"}, "ERROR", "torch.cuda.is_available() is false"),
        (TWO | {"devices": ["A100"]}, "WARN", "of which torch sees 1"),
        (TWO | {"cuda": "12.8"}, "OK", "minor-version compatibility"),
    ],
)
def test_driver_and_torch(with_driver, facts, status, text):
    assert text in only(gpus(with_driver(line() * 2, **facts)), status).text


def test_torch_that_is_not_there_is_not_compared(with_driver):
    found = with_driver(line())
    found.torch._facts = {"problem": "torch cannot be imported"}
    assert "not compared" in only(gpus(found), "OK").text


def test_ranks_without_a_gpu(with_driver):
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    found = with_driver(line() * 2, env=torchrun | {"CUDA_VISIBLE_DEVICES": "0,1"}, **TWO)
    first, _ = gpus(found)
    assert first.status == "ERROR"
    assert "local rank 3 has no GPU: it sees 2 (CUDA_VISIBLE_DEVICES=0,1)" in first.text
    four = with_driver(line() * 2, job="model=tiny --dp-replicate 4 global_batch=8", **TWO)
    assert statuses(gpus(four)) == "ERROR OK"
    two = with_driver(line() * 2, job="model=tiny --dp-replicate 2 global_batch=8", **TWO)
    assert statuses(gpus(two)) == "OK"


def test_a_driver_that_hangs(tmp_path):
    program(tmp_path / "bin", "nvidia-smi", "import time\ntime.sleep(60)\n")
    found = machine(tmp_path, env={"PATH": str(tmp_path / "bin")}, seconds=0.5)
    began = time.monotonic()
    assert "the driver hangs" in only(gpus(found), "ERROR").text
    assert time.monotonic() - began < 5


def test_a_driver_that_fails(tmp_path):
    failed = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    program(tmp_path / "bin", "nvidia-smi", f"print({failed!r})\nraise SystemExit(9)\n")
    line = only(gpus(machine(tmp_path, env={"PATH": str(tmp_path / "bin")})), "ERROR")
    assert f"exit code 9: {failed}" in line.text


def test_an_answer_that_is_not_understood(tmp_path):
    program(tmp_path / "bin", "nvidia-smi", "print('what, ever')")
    assert "not understood" in only(gpus(machine(tmp_path, env={"PATH": str(tmp_path / "bin")})), "WARN").text
