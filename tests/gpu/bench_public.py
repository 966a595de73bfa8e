"""What a caller gets of published pairs with random weights, beside the raw cycle: one table, one run, one GPU.

    python tests/gpu/bench_public.py [--pair qwen3.6-27b:nvfp4 ...] [--output FILE] [--commit COMMIT]
    python tests/gpu/bench_public.py --bundle BUNDLE    # of any backend, on any machine, with its own accept length

Columns, each by the wall clock from the first token on: cycles called directly (backend.cycle, commit), Planner.plan,
Planner.plan under a JSON Schema, and Planner.connect in another process that asks the service over a Unix socket.
Without llguidance, or what the service needs, its column says so.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from edge_dflash.bench.device import CUBINS, Device, force, on_device, probe_device
from edge_dflash.bench.measure import ROUNDS, Meter, decoded, host_cycle
from edge_dflash.bench.provenance import ClockSample, describe
from edge_dflash.bench.random_pair import synthetic_pair
from edge_dflash.bench.run import decode_all, fitted
from edge_dflash.bench.subjects import bundle_subject, synthetic_subject
from edge_dflash.bench.workload import Workload, accept_pattern
from edge_dflash.errors import EdgeDflashError
from edge_dflash.planner import Planner

PAIRS = ("qwen3.6-27b:nvfp4", "qwen3.5-9b:nvfp4", "qwen3.5-4b:nvfp4", "qwen3-8b:bf16")
SERVING = ("starlette", "uvicorn", "prometheus_client", "httpx2")
ASK_SECONDS = 120  # most that the other process may take
say = partial(print, file=sys.stderr, flush=True)


def absent(*names):
    """Why a column is empty; None when all packages are there."""
    found = [name for name in names if find_spec(name) is None]
    return f"no {', '.join(found)}" if found else None


def measure(subject, device, work):
    """One row: each column's Decode as a dictionary, or why it is empty."""
    why = absent("llguidance")
    subject = replace(subject, form=None) if why else subject
    planner, accept = subject.planner, work.accept_length
    work = fitted(work, planner.backend, say)
    if accept is not None:
        force(on_device(planner.backend), accept_pattern(accept, planner.shape.block_size))
    meter = Meter(planner, subject.costs, device.bandwidth)
    decodings, formed = decode_all(meter, subject, work)
    sample = ClockSample()
    if on_device(planner.backend):
        cycle = meter.device_cycle(subject.prompts[0], sample)
    else:
        cycle = host_cycle(decodings.cycles)
    row = {"pair": subject.title, "weights": subject.weights, "prompts": subject.source, "load_s": subject.load_seconds}
    row["clocks"] = sample.result()
    row |= {"raw": asdict(decodings.raw), "planner": asdict(decodings.planned)}
    row["schema"] = asdict(formed) if formed else why or "no tokenizer"
    row["passes_ms"] = {"propose": cycle.propose.ms, "verify": cycle.verify.ms, "floor": cycle.whole.floor_ms}
    why = absent(*SERVING)
    try:
        row["service"] = why or through_service(subject, work.budget(planner.shape.block_size))
    except Exception as error:  # the other columns are there
        row["service"] = f"failed: {error}"
    return row


def through_service(subject, tokens):
    """Decode of another process that asks a service of this one. Closes the subject's backend."""
    with tempfile.TemporaryDirectory() as folder, served(subject.planner, Path(folder)) as url:
        question = {"url": url, "prompts": [list(ids) for ids in subject.prompts], "tokens": tokens}
        command = [sys.executable, __file__, "--ask"]
        answer = subprocess.run(
            command, input=json.dumps(question), capture_output=True, text=True, timeout=ASK_SECONDS, check=False
        )
    return json.loads(answer.stdout) if answer.returncode == 0 else f"failed: {answer.stderr.strip()[-300:]}"


@contextmanager
def served(planner, folder):
    """The service on a Unix socket with the planner's backend, in threads of this process; its URL."""
    import uvicorn

    from edge_dflash.serve.config import from_table
    from edge_dflash.serve.server import listening, uvicorn_config
    from edge_dflash.serve.service import Service

    path = folder / "planner.sock"
    names = {"bundle": "bench", "model": "bench", "socket": str(path), "state_dir": str(folder / "state")}
    service = Service(from_table({"service": names}))
    stop = planner.stop_token_ids
    service.take(Planner(planner.backend, planner.tokenizer, stop, fallback=False, observer=service.observer))
    service.open_doors()
    with listening(service.config, ()) as sockets:
        server = uvicorn.Server(uvicorn_config(service, {}))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets)))
        thread.start()
        try:
            while not server.started and thread.is_alive():
                time.sleep(0.01)
            yield f"unix:{path}"
        finally:
            server.should_exit = True
            thread.join()
            service.close()


def ask(question):
    """Plans of a served planner, timed here from the first token on: the middle round, as a dictionary."""
    rounds = []
    with Planner.connect(question["url"]) as planner:
        for _ in range(1 + ROUNDS):  # the first warms up
            seconds, lengths = 0.0, []
            for prompt in question["prompts"]:
                first = None
                with planner.stream(prompt, max_new_tokens=question["tokens"]) as stream:
                    for part in stream:
                        first = first or (time.perf_counter() if part.tokens else None)
                    lengths += stream.plan.accept_lengths
                seconds += time.perf_counter() - first
            rounds.append(decoded(seconds, lengths))
    return asdict(sorted(rounds[1:], key=lambda decode: decode.ms)[ROUNDS // 2])


def table(rows):
    """The rows for people; each column is compared with the one that it is built on."""
    heads = ("pair, weights", "raw", "Planner / raw", "schema / Planner", "service / Planner")
    lines = [heads, ("", *["ms a cycle, tokens/s"] * 4)]
    for row in rows:
        if "error" in row:
            lines.append((row["pair"], row["error"]))
            continue
        cells = [f"{row['pair'].partition(',')[0]}, {row['weights']}"]
        for name, base in (("raw", None), ("planner", "raw"), ("schema", "planner"), ("service", "planner")):
            found = row[name]
            if isinstance(found, str):
                cells.append(found)
                continue
            over = f" {found['ms'] / row[base]['ms'] - 1:+.1%}" if base else ""
            cells.append(f"{found['ms']:.3f}{over}, {found['tokens_per_second']:,.0f}")
        lines.append(tuple(cells))
    wide = [max(len(line[i]) for line in lines if i < len(line) and len(line) > 2) for i in range(len(heads))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, wide, strict=False)) for line in lines)


def bundle_rows(path, work):
    from edge_dflash.cli.prompts import bench_prompts

    with bundle_subject(path, partial(bench_prompts, path, max_new_tokens=work.tokens), say) as subject:
        return [measure(subject, Device(), work)]


def pair_rows(names, work, folder, keep):
    """A row for each pair; ``keep`` is told all of them after each, so that a run that is cut leaves something."""
    device, cubin = probe_device(folder, say)
    rows = []
    for name, _, kind in (name.partition(":") for name in names):
        began = time.perf_counter()
        try:
            with synthetic_subject(name, kind or "nvfp4", work, cubin, say) as subject:
                rows.append(measure(subject, device, work))
        except EdgeDflashError as error:
            rows.append({"pair": name, "error": str(error)})
        say(f"{table(rows[-1:])}\n{name}: {time.perf_counter() - began:.1f} s")
        keep(device, rows)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", action="append", help=f"NAME:WEIGHTS, again and again; default: {' '.join(PAIRS)}")
    parser.add_argument("--bundle", type=Path, help="instead of pairs")
    parser.add_argument("--accept-length", type=float, default=5.0, help="forced on pairs")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--cubins", type=Path, default=CUBINS)
    parser.add_argument("--commit", help="what to record where git does not know it")
    parser.add_argument("--output", type=Path, default=Path("bench_public.json"))
    parser.add_argument("--ask", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ask:
        print(json.dumps(ask(json.load(sys.stdin))))
        return
    pairs = options.pair or PAIRS
    for name in pairs:
        synthetic_pair(name.partition(":")[0])
    work = Workload(options.context, options.tokens, prefill=(), accept_length=options.accept_length)
    keep = partial(write, options, time.perf_counter())
    if options.bundle:
        rows = bundle_rows(options.bundle, replace(work, accept_length=None))
        keep(Device(), rows)
    else:
        rows = pair_rows(pairs, work, options.cubins, keep)
    print(table(rows))
    say(f"written: {options.output}")


def write(options, began, device, rows):
    """The JSON file, as far as it has come."""
    machine = {**describe(), **device.description} | ({"commit": options.commit} if options.commit else {})
    forced = None if options.bundle else options.accept_length
    found = {"machine": machine, "read_bandwidth": device.bandwidth, "forced_accept_length": forced}
    found |= {"context": options.context, "seconds": time.perf_counter() - began, "rows": rows}
    options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
