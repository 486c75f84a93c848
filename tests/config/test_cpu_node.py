"""A CPU node with another number of processes than it was measured with."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from phalanx.config.cluster import Accelerator, Cluster, Link, Sharing, with_processes
from phalanx.config.clusters import CLUSTERS

DEVICE = Accelerator("a cpu", fp32_tflops=0.2, memory_gib=8, bandwidth_gbs=20, launch_us=2, product_us=20, host_us=10)
NODE = Cluster(
    devices_per_node=2,
    device="cpu",
    accelerator=DEVICE,
    intra=Link(1.2, 300, 1.0),
    sharing=Sharing(node_cores=2, processes=2, alone_products=1.8, alone_streams=1.5),
)


def test_as_many_as_were_measured_are_as_measured():
    assert with_processes(NODE, 2) == replace(NODE, sharing=Sharing())


def test_one_has_what_one_alone_was_measured_to_have():
    one = with_processes(NODE, 1)
    assert one.devices_per_node == 1
    assert one.accelerator == replace(DEVICE, fp32_tflops=1.8 * 0.2, bandwidth_gbs=1.5 * 20, memory_gib=16)


def test_more_than_cores_wait_for_their_turn():
    four = with_processes(NODE, 4)
    halves = {"fp32_tflops": 0.1, "bandwidth_gbs": 10, "memory_gib": 4}
    assert four.accelerator == replace(DEVICE, **halves, launch_us=4, product_us=40, host_us=20)
    assert four.intra == Link(0.6, 600, 1.0)


def test_more_processes_within_the_cores_only_share():
    wide = replace(NODE, sharing=replace(NODE.sharing, node_cores=16))
    four = with_processes(wide, 4)
    assert (four.accelerator.fp32_tflops, four.accelerator.host_us, four.intra.latency_us) == (0.1, 10, 300)


def test_links_are_shared_by_those_that_they_were_measured_among():
    four = with_processes(replace(NODE, sharing=replace(NODE.sharing, linked=4)), 4)
    assert (four.intra, four.accelerator.fp32_tflops) == (NODE.intra, 0.1)


@given(st.integers(1, 64), st.integers(1, 64))
def test_a_second_time_changes_nothing(first, second):
    once = with_processes(NODE, first)
    assert with_processes(once, second) == once


@given(st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([2, 4, 8, 16]))
def test_rates_fall_with_the_number_of_processes(few, measured):
    node = replace(NODE, sharing=Sharing(16, measured, 0, 0.9 * measured, 0.6 * measured))
    each = [with_processes(node, n).accelerator for n in (few, 2 * few)]
    assert each[0].fp32_tflops > each[1].fp32_tflops
    assert each[0].bandwidth_gbs > each[1].bandwidth_gbs


def test_devices_of_their_own_share_nothing():
    machine = CLUSTERS["dgx-h100"]
    assert with_processes(machine, 4) == machine
