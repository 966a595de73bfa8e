from __future__ import annotations

import tomllib
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest

from edge_dflash.errors import ConfigError
from edge_dflash.serve.config import ServeConfig, from_table, load_config

FILE = Path(__file__).resolve().parent.parent / "deploy" / "config.toml"


def test_the_documented_file_is_the_defaults():
    assert load_config(FILE) == ServeConfig()


def test_the_documented_file_has_every_key_with_a_comment():
    table = tomllib.loads(FILE.read_text())
    for section in fields(ServeConfig):
        assert list(table[section.name]) == [key.name for key in fields(getattr(ServeConfig(), section.name))]
    lines = FILE.read_text().splitlines()
    for before, line in pairwise(lines):
        if "=" in line and not line.startswith("#"):
            assert before.startswith("# "), line


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[service]\nbundel = 'x'", "service.bundel is unknown; keys of service are bundle"),
        ("[server]\n", "'server' is no section"),
        ("bundle = 'x'", "'bundle' is no section"),
        ("[engine]\nqueue = 'many'", "engine.queue is 'many'; give a whole number"),
        ("[engine]\nqueue = true", "engine.queue is 'True'"),
        ("[engine]\nqueue = 0", "engine.queue is 0; give at least 1"),
        ("[limits]\nnew_tokens = -1", "limits.new_tokens is -1"),
        ("[timeouts]\nbody = 0", "timeouts.body is 0.0; give seconds above 0"),
        ("[timeouts]\nbody = nan", "timeouts.body is nan"),
        ("[timeouts]\nbody = inf", "timeouts.body is inf"),
        (f"[timeouts]\nbody = {10**400}", "timeouts.body is inf"),
        ("[sessions]\nsave = 'often'", "sessions.save is 'often'; accepted are turn, shutdown, never"),
        ("[service]\nself_test = 'maybe'", "service.self_test is 'maybe'"),
        ("[service]\nsocket_mode = '0666'", "give 0600 or 0660"),
        ("[service]\nsocket_mode = 'rw'", "give 0600 or 0660"),
        ("[service]\nsocket = ''", "both"),
        ("[service]\ntcp = '8080'", "HOST:PORT"),
        ("[service]\ntcp = '127.0.0.1:99999'", "HOST:PORT"),
        ("[service]\ntcp = '0.0.0.0:8080'", "no api_key_file"),
        ("[service]\ntcp = 'robot.example:8080'", "no api_key_file"),
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


def test_unreadable_files_are_named(tmp_path):
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


def test_the_model_is_named_after_its_bundle(tmp_path):
    assert from_table({"service": {"bundle": str(tmp_path / "thor")}}).model == "thor"
    assert from_table({"service": {"model": "planner"}}).model == "planner"
