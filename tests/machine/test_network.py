"""Names, interfaces, ports and the rendezvous."""

import socket
import time

import pytest

from machine.machines import machine, only, write
from phalanx.machine import network
from phalanx.machine.checks import CHECKS, run

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
