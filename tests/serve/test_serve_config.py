from __future__ import annotations

import socket
from pathlib import Path

import pytest

from edge_dflash.errors import ConfigError, ServiceError
from edge_dflash.runner.settings import OpenSettings
from edge_dflash.serve.config import ServeConfig, from_table, load_config, written
from edge_dflash.serve.limits import read_keys
from edge_dflash.serve.server import listening

FILE = Path(__file__).resolve().parents[2] / "deploy" / "config.toml"


def test_the_documented_file_is_the_defaults():
    assert FILE.read_text() == written()
    assert load_config(FILE) == ServeConfig()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[service]\nbundel = 'x'", "service.bundel is unknown here; did you mean bundle? known are bundle, model"),
        ("[server]\n", "'server' is no section"),
        ("bundle = 'x'", "'bundle' is no section"),
        ("[service]\nrecord_mib = 0", "service.record_mib is 0; give a whole number of at least 1"),
        ("[engine]\nqueue = true", "engine.queue is True; give a whole number of at least 1"),
        ("[engine]\nlanes = 9", "engine.lanes is 9; give a whole number from 1 to 8, or 0"),
        ("[engine]\ndrafts = -2", "engine.drafts is -2; give a whole number of at least 0, or -1"),
        ('[service]\nmodel = "a\\u0000"', "service.model is 'a"),
        ("[engine]\nprompt_share = 0.0", "engine.prompt_share is 0.0; give a number from 0.01 to 1"),
        ("[timeouts]\nbody = 0", "timeouts.body is 0; give seconds above 0"),
        (f"[timeouts]\nbody = {10**400}", "timeouts.body is 1000"),
        ("[defaults]\ndraft_confidence = 1.5", "defaults.draft_confidence is 1.5; give a number from 0 to 1"),
        ("[sessions]\nsave = 'often'", "sessions.save is 'often'; give one of turn, shutdown, never"),
        ("[service]\nsocket_mode = '0666'", "give 0600 or 0660"),
        ("[service]\nsocket = ''", "both"),
        ("[service]\ntcp = '8080'", "HOST:PORT"),
        ("[service]\ntcp = '127.0.0.1:99999'", "HOST:PORT"),
        ("[service]\ntcp = '0.0.0.0:8080'", "no api_key_file"),
        ("[service", "is not TOML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, named):
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_engine_has_the_planners_own_settings():
    found = from_table({"engine": {"lanes": 0, "drafts": 3, "prefix_mib": 2, "images": 0}}).engine
    assert found == OpenSettings(drafts=3, prefix_bytes=2 << 20, images=0)
    assert from_table({"engine": {"lanes": 2, "drafts": -1}}).engine == OpenSettings(lanes=2)


def test_unreadable_files_are_named_and_the_model_after_its_bundle(tmp_path):
    assert from_table({"service": {"bundle": str(tmp_path / "thor")}}).model == "thor"
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b"[service]\nmodel = '\xff'")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_config(tmp_path / "latin.toml")


def test_loopback_needs_no_key_and_others_do(tmp_path):
    for address in ("127.0.0.1:8080", "[::1]:0", "localhost:1"):
        assert from_table({"service": {"tcp": address}}).tcp_address[1] < 9000
    key = str(tmp_path / "key")
    assert from_table({"service": {"tcp": "0.0.0.0:8080", "api_key_file": key}}).tcp_address == ("0.0.0.0", 8080)


def test_a_key_that_cannot_be_used_is_named(tmp_path):
    file = tmp_path / "key"
    with pytest.raises(ConfigError, match=f"cannot read the API key {file}: No such file"):
        read_keys(str(file))
    for data, mode, words in (
        ("schlüssel-für-alle".encode(), 0o600, "is not ASCII; write a new one"),
        (b"0123456789abcdef\n", 0o604, "everybody can read the API key .*; chmod o-rwx it"),
        (b"0123456789abcde\n", 0o600, "has 15 characters; give at least 16, without blanks"),
        (b"0123456789abcdef\narm 0123456789abcdeg\n", 0o600, "line 1: give one key alone, or lines of NAME KEY"),
        (b"../x 0123456789abcdef\n", 0o600, "line 1: give one key alone, or lines of NAME KEY"),
        (b"arm 0123456789abcdef\nleg 0123456789abcdef\n", 0o600, "line 2: the key is there twice"),
    ):
        file.write_bytes(data)
        file.chmod(mode)
        with pytest.raises(ConfigError, match=words):
            read_keys(str(file))
    file.write_text("0123456789abcdef\n")
    file.chmod(0o640)  # its group is the service's
    assert read_keys(str(file)) == {"0123456789abcdef": "key"}


def test_a_key_file_names_accounts(tmp_path):
    file = tmp_path / "key"
    file.write_text("arm 0123456789abcdef\n\narm 0123456789abcdeg\ndesk-1 0123456789abcdeh\n")
    file.chmod(0o600)
    found = {"0123456789abcdef": "key-arm", "0123456789abcdeg": "key-arm", "0123456789abcdeh": "key-desk-1"}
    assert read_keys(str(file)) == found


def test_addresses_that_cannot_be_listened_on_are_named(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        config = from_table({"service": {"socket": "", "tcp": f"127.0.0.1:{port}"}})
        with (
            pytest.raises(
                ServiceError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use; give another"
            ),
            listening(config, []),
        ):
            pass
    path = tmp_path / ("x" * 120)
    with (
        pytest.raises(ServiceError, match=f"cannot listen on {path}: .*; give another service.socket"),
        listening(from_table({"service": {"socket": str(path)}}), []),
    ):
        pass


def test_a_socket_of_systemd_that_others_reach_needs_a_key():
    with (
        socket.create_server(("0.0.0.0", 0)) as one,
        pytest.raises(
            ServiceError, match=r"0\.0\.0\.0 can be reached by others and there is no api_key_file; give one"
        ),
        listening(ServeConfig(), [one]),
    ):
        pass
