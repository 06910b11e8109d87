"""``forerun serve``: where it listens, and what it refuses."""

import socket

import pytest
from command_line import invoke


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::"])
def test_an_address_that_others_reach_has_to_be_meant(host):
    result = invoke("serve", "--host", host)
    assert result.exit_code == 2
    assert "add --allow-remote to allow it" in result.stderr


def test_a_port_in_use_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as other:
        result = invoke("serve", "--port", str(other.getsockname()[1]))
    assert result.exit_code == 1
    assert "take another with --port" in result.stderr
    assert result.stderr.count("\n") == 1
