"""The rules that every test runs under hold."""

import os
import socket

import pytest


@pytest.mark.parametrize("host", ["example.com", "192.0.2.1", "2001:db8::1"])
def test_the_network_is_out_of_reach(host: str) -> None:
    with pytest.raises(RuntimeError, match="loopback addresses only"):
        socket.create_connection((host, 80), timeout=1)


def test_raw_sockets_are_guarded_too() -> None:
    with socket.socket() as plain, pytest.raises(RuntimeError, match="loopback"):
        plain.connect(("192.0.2.1", 80))
    with socket.socket() as plain, pytest.raises(RuntimeError, match="loopback"):
        plain.connect_ex(("192.0.2.1", 80))


def test_loopback_works() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(("localhost", server.getsockname()[1]), timeout=5)
        accepted, _ = server.accept()
        with client, accepted:
            accepted.sendall(b"here")
            assert client.recv(4) == b"here"


def test_torch_has_one_thread_and_the_hub_is_offline() -> None:
    import huggingface_hub.constants
    import torch

    assert torch.get_num_threads() == 1
    assert huggingface_hub.constants.HF_HUB_OFFLINE
    assert not [name for name in os.environ if name.startswith("STEERPIPE_")]
