"""One table of architectures: every spelling means one board, everywhere, and others are answered with the accepted."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from cubin_support import CACHE, cubin
from native_support import NATIVE_PAIR, formats_of, write_native_bundle

from edge_dflash.backends.cuda import support as devices
from edge_dflash.backends.cuda.support import check_native
from edge_dflash.backends.cuda.tensorrt import flavours
from edge_dflash.board.archs import ARCHS, BACKENDS, CHUNK_SECONDS, arch_of_sm, find_arch
from edge_dflash.board.profiles import board_profiles, load_board, named_arch, read_board
from edge_dflash.builder.decide import choose
from edge_dflash.bundle.manifest import dump_manifest, parse_manifest
from edge_dflash.bundle.reader import Bundle
from edge_dflash.checks.footprint import expert_parameters, row_parameters
from edge_dflash.checks.inspect import inspect_recipe
from edge_dflash.cli.build import find_recipe
from edge_dflash.common.files import directory
from edge_dflash.errors import BackendError, BundleError, RecipeError
from edge_dflash.model import pair_programs
from edge_dflash.weights.recipe import default_recipe
from tests.checks.test_inspect import MODELS, spec
from tests.scripts.kernels import main

GPUS = [arch for arch in ARCHS if arch.sm]


def spellings(sm):
    return (f"sm{sm}", f"sm{sm}a", f"SM{sm}", f"sm_{sm}", f"sm_{sm}a", f"{sm}", f"{sm}a", f"{sm / 10:.1f}", f" sm{sm} ")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    path = tmp_path_factory.mktemp("archs") / "bundle"
    write_native_bundle(path, formats_of("nvfp4"))
    return Bundle.open(path)


@pytest.mark.parametrize("arch", GPUS, ids=lambda arch: arch.name)
def test_every_spelling_means_one_architecture(arch, bundle):
    for word in spellings(arch.sm):
        assert find_arch(word) is arch
        for backend in (None, "native"):
            assert choose(word, backend, default_recipe()).arch is arch
        assert flavours.flavour_of(word).module == arch.tensorrt
        assert find_arch(word).capability == f"SM{arch.sm}"
        devices.check_arch(word, arch.sm, "b")
        check_native(NATIVE_PAIR, formats_of("nvfp4"), arch=word)
        text = dump_manifest(replace(bundle.manifest, arch=word))  # as earlier versions wrote it
        assert parse_manifest(text).arch == word
        bundle.require(backend="native", archs=(word, "sm90a"))
    assert arch_of_sm(arch.sm) is arch
    assert arch.kernels in (arch.name, f"{arch.name}a")


@pytest.mark.parametrize("word", ["sm42", "sm100a", "", "sm", "a", "cuda", "sm1100", "1.10", "11.00", "sm110b", "nano"])
def test_an_unknown_architecture_is_answered_with_the_accepted_ones(word, refused, tmp_path):
    with pytest.raises(BackendError, match="accepted are cpu, sm87, sm89, sm90, sm110, sm120, sm121"):
        find_arch(word)
    code, line = refused("build", "--target", "t", "--drafter", "d", "--output", tmp_path / "o", "--arch", word)
    assert code == BackendError.exit_code
    assert f"arch is {word!r}; accepted are cpu, sm87" in line


@pytest.mark.parametrize(
    ("board", "arch"), [("thor", "sm110"), ("orin", "sm87"), ("Spark", "sm121"), ("t4000", "sm110")]
)
def test_a_board_stands_for_its_architecture(board, arch, tmp_path):
    assert named_arch(board).name == named_arch(arch).name == arch
    assert load_board(board).sm == named_arch(arch).sm
    assert choose(board, None, default_recipe()).arch.name == arch


def test_every_board_of_inspect_is_an_architecture_of_build():
    for profile in board_profiles():
        for name in (profile.name, *profile.aliases):
            assert named_arch(name).sm == profile.sm
    with pytest.raises(
        BackendError, match=r"accepted are cpu, sm87.*; so are boards: agx-thor, dgx-spark, orin-agx-64"
    ):
        named_arch("nano")


def test_the_cpu_runs_no_kernels():
    there = find_arch("CPU").backends
    assert there[0] == "reference"
    for backend in (one for one in BACKENDS if one not in there):
        with pytest.raises(
            BackendError, match=f"'cpu', which the {backend} backend does not run on; accepted are sm87"
        ):
            find_arch("cpu", backend)


def test_kernels_are_compiled_for_every_spelling(capsys):
    for word in ("110", "sm110", "sm110a"):
        assert cubin("finish", word) == cubin("finish", "sm110a")
        assert main(["--arch", word, "--unit", "finish", "--cache", str(CACHE)]) == 0
    assert not list(CACHE.glob("finish-sm110-*.cubin"))  # one file, named as the compiler names the arch
    capsys.readouterr()


def test_boards_are_found_by_arch_and_may_name_it(tmp_path):
    for word in spellings(110):
        assert load_board(word).name == "agx-thor"
    assert load_board("sm87a").name == "orin-agx-64"
    assert load_board("12.1").name == "dgx-spark"
    with pytest.raises(RecipeError, match="unknown board 'sm90'"):
        load_board("sm90")
    document = yaml.safe_load((directory("jetson") / "agx-thor.yaml").read_text())
    for word in (*spellings(110), 110):
        (tmp_path / "board.yaml").write_text(yaml.safe_dump({**document, "sm": word}))
        assert read_board(tmp_path / "board.yaml").sm == 110
    (tmp_path / "board.yaml").write_text(yaml.safe_dump({**document, "sm": "sm42"}))
    with pytest.raises(RecipeError, match=r"board.yaml.sm: arch is 'sm42'; accepted are"):
        read_board(tmp_path / "board.yaml")


def test_recipes_are_found_by_either_spelling():
    for name in ("qwen3.6-27b-sm110", "qwen3.6-27b-sm110-mixed", "qwen3.5-4b-sm87"):
        spelled = name.replace("sm110", "sm110a").replace("sm87", "sm87a")
        assert find_recipe(Path(spelled)) == find_recipe(Path(name))
    with pytest.raises(RecipeError, match="no recipe file x-sm110a"):
        find_recipe(Path("x-sm110a"))


def test_a_manifest_of_an_unknown_architecture_is_refused(bundle):
    with pytest.raises(BundleError, match="m: arch is 'sm42'; accepted are cpu, sm87"):
        parse_manifest(dump_manifest(replace(bundle.manifest, arch="sm42")), "m")


def test_a_prefill_pass_takes_a_tenth_of_a_second_at_most():
    for model in MODELS:
        parameters = row_parameters(pair_programs(spec(model)).prefill)
        for arch in GPUS:
            rows = arch.prefill_rows(parameters)
            assert rows in (128, 256, 512, 1024, 2048)
            assert rows == 128 or arch.prefill_seconds(parameters, rows) <= CHUNK_SECONDS
            assert rows == arch.most_rows or arch.prefill_seconds(parameters, 2 * rows) > CHUNK_SECONDS


@pytest.mark.parametrize(
    ("model", "arch", "rows"),
    [
        ("qwen3.6-27b", "sm110", 128),
        ("qwen3.6-27b", "sm90", 512),
        ("qwen3.5-4b", "sm90", 2048),
        ("qwen3.5-4b", "sm110", 256),
        ("qwen3.6-35b-a3b", "sm110", 256),
        ("qwen3.5-4b", "sm87", 128),
        ("qwen3.6-27b", "cpu", 32),
    ],
)
def test_chunks_by_model_and_architecture(model, arch, rows):
    prefill = pair_programs(spec(model)).prefill
    assert find_arch(arch).prefill_rows(row_parameters(prefill), experts=expert_parameters(prefill)) == rows


def test_a_pass_takes_no_less_than_its_weights():
    wide = replace(default_recipe(), target=dict.fromkeys(default_recipe().target, "bf16"))
    found, thor = inspect_recipe(spec("qwen3.6-27b"), wide, board=load_board("thor")), load_board("thor")
    weights = 2 * row_parameters(pair_programs(spec("qwen3.6-27b")).prefill)
    assert found.prefill_chunk_ms > thor.milliseconds(weights) > 1e3 * CHUNK_SECONDS


@pytest.mark.parametrize(("activations", "rows"), [("bf16", 2048), ("nvfp4", 512)])
def test_inspect_takes_the_chunk_of_what_can_run_the_recipe(activations, rows):
    recipe = replace(default_recipe(), activations=activations)
    assert inspect_recipe(spec("qwen3.5-4b"), recipe, board=replace(load_board("sm110"), sm=90)).prefill_chunk == rows
