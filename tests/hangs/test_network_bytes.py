"""A download is work; what ranks and their store exchange is not. Told by the kernel's count of real connections."""

import os
import socket
import sys

import pytest

from course_lib.hangs.network_bytes import BUSY_BYTES, WINDOW, Peers, Traffic, connections, own_addresses
from tests.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells what a connection has moved")
OWN = [os.getpid()]
FAMILIES = {"IPv4": (socket.AF_INET, "127.0.0.1"), "mapped": (socket.AF_INET6, "::ffff:127.0.0.1")}


@pytest.fixture(params=FAMILIES)
def download(request):
    """A connection to a child, its number, and a function that receives so many bytes from it."""
    family, address = FAMILIES[request.param]
    server = socket.create_server(("127.0.0.1", 0))
    child = os.fork()
    if child == 0:
        accepted, _ = server.accept()
        server.close()
        while wanted := accepted.recv(8):
            accepted.sendall(b"x" * int(wanted))
        os._exit(0)
    port = server.getsockname()[1]
    server.close()
    connection = socket.socket(family)
    connection.connect((address, port))

    def receive(count):
        before = counted(port)
        connection.send(f"{count:8}".encode())
        left = count
        while left:
            left -= len(connection.recv(left))
        until(lambda: counted(port) - before >= count)

    yield child, port, receive
    connection.close()
    os.waitpid(child, 0)


def counted(port):
    """What the kernel says of this process's end."""
    return next((end.moved for end in connections() if end.other[1] == port), 0)


def test_what_is_downloaded_counts_and_what_peers_and_the_store_send_does_not(download):
    child, port, receive = download
    everybody = Traffic(Peers)
    others = [Traffic(lambda: Peers(pids={child})), Traffic(lambda: Peers(ports={port}))]
    others.append(Traffic(lambda: Peers(addresses={"127.0.0.1"})))
    assert not any(traffic.is_busy(OWN, now=0.0) for traffic in (everybody, *others))
    receive(2 * BUSY_BYTES)
    assert everybody.is_busy(OWN, now=1.0)
    assert not any(traffic.is_busy(OWN, now=1.0) for traffic in others)


def test_a_heartbeat_is_no_work_and_what_was_long_ago_does_not_count(download):
    *_, receive = download
    traffic = Traffic()
    assert not traffic.is_busy(OWN, now=0.0)
    for second in range(1, 10):
        receive(BUSY_BYTES // 2)
        assert not traffic.is_busy(OWN, now=float(second))
    receive(10 * BUSY_BYTES)
    assert traffic.is_busy(OWN, now=10.0)
    assert not traffic.is_busy(OWN, now=10.0 + 2 * WINDOW)
    assert not traffic.is_busy(OWN, now=10.0 + 2 * WINDOW + 1)


def test_a_slow_download_counts_at_once_after_a_time_in_which_nobody_asked(download):
    """In which the rank was in collectives."""
    *_, receive = download
    traffic = Traffic()
    traffic.is_busy(OWN, now=0.0)
    receive(BUSY_BYTES)
    assert not traffic.is_busy(OWN, now=100.0)
    for second in range(1, 4):
        receive(2 * BUSY_BYTES)
        assert traffic.is_busy(OWN, now=100.0 + second)


def test_addresses_by_which_others_know_this_machine_are_not_loopback():
    assert not any(address.startswith("127.") or address == "::1" for address in own_addresses())
