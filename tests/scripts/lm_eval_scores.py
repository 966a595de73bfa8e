"""lm-eval against the service: ``local-completions`` on tasks of this file's own, next to transformers.

``python tests/scripts/lm_eval_scores.py --lm-eval PYTHON`` serves the demo pair on a port of this machine, once in
float32, once as a bundle of BF16 weights and KV cache. PYTHON (of an environment with ``lm_eval[api]``,
transformers and accelerate) runs a multiple choice, a likelihood and a generation task over lines of JSON against
it, and by transformers in float32. The last line of the output is a JSON object: of each the largest difference of
a log-likelihood, how often the greedy flag and the generated text are equal, and scored requests a second.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from service_support import Process, fake_service, live

from edge_dflash.backends.reference.backend import ReferenceBackend
from edge_dflash.builder.write import BuildConfig, build
from edge_dflash.decode.backend import Precision
from edge_dflash.demo.tasks import HELDOUT, MODELS
from edge_dflash.model import pair_programs
from edge_dflash.model.registry import read_pair
from edge_dflash.text.tokenizer import Tokenizer
from edge_dflash.weights.checkpoint import PairCheckpoint

TARGET, DRAFTER = MODELS / "target", MODELS / "drafter"
CONTEXT, CHARACTERS, NEW = 1024, 80, 24
RECIPE = f"""schema: 1
name: unrounded
description: BF16 weights, keys and values.
target: {{attention: bf16, gated_delta: bf16, mlp: bf16, lm_head: bf16}}
drafter: {{attention: bf16, mlp: bf16, fc: bf16}}
activations: bf16
kv: bf16
context: {{max_context: {CONTEXT}}}
"""
TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {lines}}}}}
test_split: test
doc_to_text: "{{{{context}}}}"
target_delimiter: ""
"""
KINDS = {
    "own_choice": """output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{right}}"
metric_list: [{metric: acc}]
""",
    "own_likelihood": """output_type: loglikelihood
doc_to_target: "{{choices[right]}}"
metric_list: [{metric: acc}]
""",
    "own_generation": f"""output_type: generate_until
doc_to_target: "{{{{choices[right]}}}}"
generation_kwargs: {{until: ["<|im_end|>"], max_gen_toks: {NEW}, do_sample: false, temperature: 0}}
metric_list: [{{metric: exact_match}}]
""",
}


def write_tasks(directory: Path, count: int) -> None:
    """Lines of a context and three begins of answers, of which one is right; the tasks over them."""
    tokenizer = Tokenizer.open(TARGET)
    tasks = [json.loads(line) for line in HELDOUT.read_text().splitlines()]
    spelled = [
        "".join(tokenizer.render_pieces(one["messages"], tools=None, enable_thinking=False)) for one in tasks[:count]
    ]
    lines = [
        {
            "context": context,
            "choices": [tasks[(at + step - at % 3) % len(tasks)]["answer"][:CHARACTERS] for step in range(3)],
            "right": at % 3,
        }
        for at, context in enumerate(spelled)
    ]
    file = directory / "lines.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in lines))
    for name, kind in KINDS.items():
        (directory / f"{name}.yaml").write_text(TASK.format(name=name, lines=file) + kind)


@contextmanager
def bundled(directory: Path, lanes: int):
    """The address of a process that serves the pair as a BF16 bundle."""
    recipe = directory / "recipe.yaml"
    recipe.write_text(RECIPE)
    build(BuildConfig(TARGET, DRAFTER, directory / "bundle", recipe=recipe, lanes=lanes, calibrate=False))
    with Process(directory / "bundle", directory, tcp=True) as process:
        yield process.tcp


@contextmanager
def float32(directory: Path, lanes: int):
    """The address of this process, which serves the pair in float32."""
    pair = read_pair(TARGET, DRAFTER)
    store = PairCheckpoint.open(TARGET, DRAFTER, pair_programs(pair).weights)
    backend = ReferenceBackend(pair, store, Precision("float32", "float32"), max_context=CONTEXT, lanes=lanes)
    service = fake_service(directory, backend, Tokenizer.open(TARGET))
    with live(service, directory, tcp=True) as url:
        yield url
    service.close()


def run(python: str, directory: Path, out: Path, model: str, arguments: str) -> list[dict]:
    """What lm-eval noted of each request."""
    command = [python, "-m", "lm_eval", "run", "--model", model, "--model_args", arguments, "--tasks", *KINDS]
    command += ["--include_path", str(directory), "--log_samples", "--output_path", str(out), "--batch_size", "1"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "0"}
    done = subprocess.run(command, env={**os.environ, **offline}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    found = []
    for name in KINDS:
        (file,) = out.rglob(f"samples_{name}_*.jsonl")
        samples = sorted((json.loads(line) for line in file.read_text().splitlines()), key=lambda one: one["doc_id"])
        found += [one["resps"] for one in samples]
    return [answer[0] for answers in found for answer in answers]


def compare(here: list, there: list) -> dict:
    """Log-likelihoods and texts of a service next to those of transformers."""
    scores = [(float(a[0]), float(b[0]), str(a[1]) == str(b[1])) for a, b in zip(here, there, strict=True)
              if not isinstance(a, str)]  # fmt: skip
    texts = [a == b for a, b in zip(here, there, strict=True) if isinstance(a, str)]
    return {
        "loglikelihoods": len(scores),
        "largest_difference": max(abs(a - b) for a, b, _ in scores),
        "mean_difference": sum(abs(a - b) for a, b, _ in scores) / len(scores),
        "greedy_equal": sum(same for *_, same in scores),
        "texts": len(texts),
        "texts_equal": sum(texts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lm-eval", required=True, help="python of an environment with lm-eval and transformers")
    parser.add_argument("--lines", type=int, default=12)
    parser.add_argument("--lanes", type=int, default=2)
    given = parser.parse_args()
    result: dict = {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (tasks := root / "tasks").mkdir()
        write_tasks(tasks, given.lines)
        there = run(given.lm_eval, tasks, root / "hf", "hf", f"pretrained={TARGET},dtype=float32")
        for kind, serving in {"float32": float32, "bf16_bundle": bundled}.items():
            (directory := root / kind).mkdir()
            with serving(directory, given.lanes) as url:
                model = "fake" if kind == "float32" else "demo"
                arguments = f"model={model},base_url={url}/v1/completions,tokenizer={TARGET},max_length={CONTEXT - 16},"
                arguments += f"tokenizer_backend=huggingface,tokenized_requests=True,num_concurrent={given.lanes}"
                began = time.perf_counter()
                here = run(given.lm_eval, tasks, directory / "out", "local-completions", arguments)
                result[kind] = compare(here, there) | {"seconds": time.perf_counter() - began}
                result[kind]["requests_per_second"] = speed(url, model, tasks)
    print(json.dumps(result))


def speed(url: str, model: str, tasks: Path) -> float:
    """Scored requests a second of one client, after another, of the lines' contexts and right answers."""
    import httpx2

    lines = [json.loads(line) for line in (tasks / "lines.jsonl").read_text().splitlines()]
    with httpx2.Client(timeout=120) as client:
        began = time.perf_counter()
        for one in lines:
            body = {"model": model, "prompt": one["context"] + one["choices"][one["right"]], "max_tokens": 1}
            body |= {"logprobs": 1, "echo": True, "temperature": 0, "edge_dflash": {"raw": True}}
            client.post(f"{url}/v1/completions", json=body).raise_for_status()
    return len(lines) / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
