"""Grammars made to take time and memory: what each costs, and what else is delayed by it.

``python tests/scripts/grammar_bombs.py BUNDLE`` sends each to a planner and prints how it ended, seconds, memory of its
process and the longest delay of a thread that ticks every millisecond beside it; then the worst of them together to a
service, with ``/health`` asked beside them, a small form of another caller, and SIGTERM while they run. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from service_support import Process

from edge_dflash.decode.grammar import compiled
from edge_dflash.decode.grammar.worker import resident_bytes
from edge_dflash.errors import RequestError
from edge_dflash.planner import Planner

SMALL = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
WORST = ("and of 8 periods", "and of 5 large periods", "multiple of a prime", "repeats of repeats", "not of a period")


def lark(*factors: str) -> str:
    return "start: X\nX: " + " & ".join(f"/{factor}/" for factor in factors)


def periods(*lengths: int) -> str:
    return lark(*(f"(.{{{length}}})*" for length in lengths))


def nested(levels: int, leaf: object) -> object:
    for _ in range(levels):
        leaf = {"type": "array", "items": leaf, "minItems": 3, "maxItems": 3}
    return leaf


def tree(width: int) -> dict[str, object]:
    node = {"type": "object", "properties": {f"p{i}": {"$ref": "#/$defs/n"} for i in range(width)}}
    return {"$ref": "#/$defs/n", "$defs": {"n": node}}


def regexes() -> Iterator[tuple[str, str]]:
    yield "repeats of repeats", "((a{100}){100}){100}"
    yield "optional repeats of repeats", "((a{0,100}){0,100}){0,100}"
    yield "stars of stars", "((((a*)*)*)*)*b"
    yield "many optionals", "a?" * 2000 + "a" * 2000
    yield "exponential automaton", "(a|b)*a(a|b){18}"
    yield "exponential automaton, thrice", "(a|b)*a(a|b){12}(c|d)*c(c|d){12}(e|f)*e(e|f){12}"
    yield "alternation of repeats", "|".join(f"a{{{n}}}b" for n in range(1, 900))
    yield "large alternation", "|".join(f"word{n * 7919 % 100003}" for n in range(1500))
    yield "alternation of stars", "|".join(f"(a{{{n}}})*b" for n in (7, 11, 13, 17, 19, 23, 29, 31))
    yield "long literal", "x" * 16_000
    yield "classes of letters, repeated", "(\\p{L}{1,200}\\p{N}{1,200}){1,50}"
    yield "case folding", "(?i)(" + "|".join(f"straße{n}k" for n in range(500)) + ")"
    yield "bounded any", ".{1,4000}z.{1,4000}"
    yield "bounded any, nested", "((.{1,30}x){1,30}y){1,30}"
    yield "look-ahead", "(?=a{1000})a*"
    yield "word boundaries", "(\\b\\w{1,50}\\b ?){1,500}"
    yield "deep brackets", "(" * 5000 + "a" + ")" * 5000
    yield "counted classes", "[^a]{3000}[^b]{3000}[^c]{3000}"
    yield "overlapping choices", "(a|aa|aaa|aaaa){500}b"


def grammars() -> Iterator[tuple[str, str]]:
    yield "and of 8 periods", periods(7, 11, 13, 17, 19, 23, 29, 31)
    yield "and of 5 large periods", periods(101, 103, 107, 109, 113)
    yield "and of prefixes", lark(*(f".*a.{{{n}}}" for n in range(8, 20)))
    yield "not of a period", "start: X\nX: ~/(.{97}){89}(.{83})*/ & /(a|b)*a(a|b){14}/"
    yield "left recursion", 'start: start "a" | "b"'
    yield "endless recursion", 'start: "a" start'
    yield "ambiguous recursion", 'start: start start | "a" | "aa" | "aaa" |'
    yield "ambiguous lists", 'start: x x x x x x x x\nx: (y y?)*\ny: "a" | "aa" | y y'
    yield "long chain", "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(450)) + '\nr450: "a"'
    yield "doubling rules", "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(60)) + '\nr60: "a"'
    yield "doubling terminals", "start: T0\n" + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(30)) + '\nT30: "a"'
    yield "many terminals", "start: (" + "|".join(f"T{i}" for i in range(400)) + ")*\n" + many_terminals(400)
    yield "schema inside", 'start: %json {"type": "number", "multipleOf": 999983}'
    yield "many schemas inside", "start: " + " ".join(['%json {"type": "string", "maxLength": 900}'] * 300)
    yield "repeated rule", 'start: x{1,4000}\nx: "a" | "b" x{1,40}'
    yield "open brackets", "start: " + "[" * 60_000


def many_terminals(count: int) -> str:
    return "\n".join(f"T{i}: /[a-z]{{1,{i + 1}}}{i}/" for i in range(count))


def schemas() -> Iterator[tuple[str, object]]:
    yield "multiple of a prime", {"type": "integer", "multipleOf": 999983}
    yield "multiples of fractions", {"type": "number", "multipleOf": 0.0000037, "minimum": 0.001}
    yield "large enum", {"enum": [f"name-{n}-{n * n}" for n in range(9000)]}
    yield "large enum of numbers", {"enum": list(range(20_000))}
    yield "nested arrays", nested(40, {"type": "string", "maxLength": 500})
    yield "wide tree", tree(300)
    yield "many properties", {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(3000)}}
    yield "long text", {"type": "string", "minLength": 100_000, "maxLength": 200_000}
    yield "patterns together", {"allOf": [{"type": "string", "pattern": f"(a{{{n}}})*b"} for n in (7, 11, 13, 17, 19)]}
    yield "pattern of repeats", {"type": "string", "pattern": "^((a{100}){100}){100}$"}
    yield "many items", {"type": "array", "items": {"type": "integer"}, "minItems": 50_000}
    yield "wide range", {"type": "integer", "minimum": -(10**300), "maximum": 10**300 + 7}
    yield "ranges together", {"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967, 9949)]}
    yield "choices of choices", {"anyOf": [{"anyOf": [{"const": f"{a}-{b}"} for a in range(60)]} for b in range(60)]}
    yield "pattern properties", {"patternProperties": {f"^(a{{{n}}})*$": {"type": "null"} for n in (7, 11, 13, 17)}}
    yield "patterns of dates", {"type": "array", "items": {"type": "string", "format": "uri", "maxLength": 2000}}
    yield "unknown keyword, long", {"x" * 100_000: 1}


KINDS = {"regex": regexes, "grammar": grammars, "schema": schemas}
BOMBS = [(kind, name, value) for kind, several in KINDS.items() for name, value in several()]


class Watch(threading.Thread):
    """Ticks every millisecond, and looks at the processes of grammars."""

    def __init__(self, zygote: int) -> None:
        super().__init__(daemon=True)
        self._zygote, self._done = zygote, False
        self.delay = self.memory = 0.0

    def run(self) -> None:
        looked, shared = 0.0, resident_bytes(self._zygote)
        while not self._done:
            before = time.perf_counter()
            time.sleep(0.001)
            now = time.perf_counter()
            self.delay = max(self.delay, now - before - 0.001)
            if now - looked > 0.05:
                looked = now
                pids = Path(f"/proc/{self._zygote}/task/{self._zygote}/children").read_text().split()
                self.memory = max([self.memory, *((resident_bytes(int(pid)) - shared) / 2**20 for pid in pids)])

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._done = True
        self.join()


def planner_run(bundle: Path) -> dict[str, object]:
    rows = []
    with Planner.open(bundle, check_hashes=False, self_test="off") as planner:
        planner.plan("Go.", schema=SMALL)
        (grammars_,) = compiled._known[planner.tokenizer].values()
        with Watch(grammars_.start()._process.pid) as quiet:
            time.sleep(2.0)
        print(f"without bombs: tick delayed by {1e3 * quiet.delay:.0f} ms at most", flush=True)
        for field, name, value in BOMBS:
            began = time.perf_counter()
            with Watch(grammars_.start()._process.pid) as watch:
                try:
                    plan = planner.plan("Go.", max_new_tokens=24, **{field: value})
                    outcome = f"{len(plan.tokens)} tokens, {plan.finish_reason}"
                except RequestError as error:
                    outcome = str(error)
                seconds = time.perf_counter() - began
            rows.append((seconds, watch.memory, watch.delay))
            print(
                f"{field:8} {name:30} {seconds:6.2f} s {watch.memory:5.0f} MB tick {1e3 * watch.delay:4.0f} ms"
                f"  {outcome[:110]}",
                flush=True,
            )
    seconds, memory, delays = zip(*rows, strict=True)
    return {
        "bombs": len(rows),
        "seconds_max": max(seconds),
        "memory_mb_max": max(memory),
        "tick_delay_ms_max": 1e3 * max(delays),
        "tick_delay_ms_median": 1e3 * statistics.median(delays),
        "tick_delay_ms_without": 1e3 * quiet.delay,
    }


def service_run(bundle: Path) -> dict[str, object]:
    bombs = [(field, value) for field, name, value in BOMBS if name in WORST]
    chat = {"messages": [{"role": "user", "content": "Go."}], "max_tokens": 40}

    def ask(field: str, value: object, caller: str, deadline: float | None = None) -> tuple[int, float, str]:
        form = {field: value} if field != "schema" else {}
        body = {**chat, "edge_dflash": {**form, "caller": caller}}
        if field == "schema":
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}
        if deadline is not None:
            body["edge_dflash"]["deadline_s"] = deadline
        began = time.perf_counter()
        with process.client() as client:
            answer = client.post("/v1/chat/completions", json=body)
        return answer.status_code, time.perf_counter() - began, answer.text

    health: list[float] = []
    done = threading.Event()

    def look() -> None:
        with process.client() as client:
            while not done.is_set():
                began = time.perf_counter()
                assert client.get("/health").status_code == 200
                assert client.get("/ready").status_code == 200
                health.append(time.perf_counter() - began)
                time.sleep(0.005)

    with (
        tempfile.TemporaryDirectory() as folder,
        Process(bundle, Path(folder)) as process,
        ThreadPoolExecutor(16) as pool,
    ):
        ask("schema", SMALL, "other")
        looking = pool.submit(look)
        asked = [pool.submit(ask, *bomb, "bomber") for bomb in bombs]
        time.sleep(0.3)
        small = ask("schema", {**SMALL, "title": "another"}, "other")
        regex = ask("regex", "go+", "other")
        deadline = ask("grammar", periods(5, 7, 11, 13, 17, 19, 23, 29), "third", 1.0)
        outcomes = [one.result() for one in asked]
        done.set()
        looking.result()
        print("service: statuses of bombs", [status for status, _, _ in outcomes], "small form", small[:2], flush=True)
        late = [pool.submit(ask, *bomb, "bomber") for bomb in bombs]
        time.sleep(0.5)
        began = time.perf_counter()
        code = process.stop()
        stopped = time.perf_counter() - began
        for one in late:
            one.exception()
    health.sort()
    return {
        "health_ms_p50": 1e3 * health[len(health) // 2],
        "health_ms_p99": 1e3 * health[len(health) * 99 // 100],
        "health_ms_max": 1e3 * health[-1],
        "small_form": small[:2],
        "small_regex": regex[:2],
        "deadline_1s": (deadline[0], deadline[1], json.loads(deadline[2])["edge_dflash"]["finish_reason"]),
        "bomb_seconds_max": max(seconds for _, seconds, _ in outcomes),
        "sigterm_seconds": stopped,
        "sigterm_exit": code,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--only", choices=("planner", "service"))
    given = parser.parse_args()
    runs = {"planner": planner_run, "service": service_run}
    wanted = [given.only] if given.only else list(runs)
    print(json.dumps({name: runs[name](given.bundle.resolve()) for name in wanted}))


if __name__ == "__main__":
    main()
