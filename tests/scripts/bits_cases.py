"""The prompts of same_bits.py: every kind of request that a planner takes, deadlines left out."""

import json

from edge_dflash import Relaxation

FORMS = {
    "schema": {
        "type": "object",
        "properties": {
            "goal": {"type": "string", "maxLength": 60},
            "steps": {"type": "array", "maxItems": 6, "items": {"enum": ["go", "pick", "place", "wait", "say"]}},
            "seconds": {"type": "integer", "minimum": 3, "maximum": 250},
        },
        "required": ["goal", "steps", "seconds"],
        "additionalProperties": False,
    },
    "regex": r"(go|pick|place) to [a-z]{3,12}, [0-9]{2,4} s(, then (stop|wait))?\.",
    "lark": 'start: "plan:" (" " VERB " " NAME ";")+ "end"\nVERB: "pick" | "place"\nNAME: /[a-z]{2,8}(_[a-z]{2,8})?/',
}
TOOL = {
    "type": "function",
    "function": {
        "name": "grasp",
        "description": "Take an object.",
        "parameters": {"type": "object", "properties": {"object": {"type": "string"}}, "required": ["object"]},
    },
}


def demo_cases(tree, closing):
    """Tasks of the demo pair by name; ``tree`` holds the package, ``closing`` are the ids that close its thinking."""
    package = tree / "edge_dflash"
    task = next(package.rglob("task.txt")).read_text(encoding="utf-8")
    heldout = next(path for place in (package, tree / "calib") for path in place.rglob("heldout.jsonl"))
    known = [json.loads(line) for line in heldout.read_text(encoding="utf-8").splitlines()]
    chats = [one["messages"] for one in known]
    system = [{"role": "system", "content": "You are a careful household robot."}, {"role": "user", "content": task}]
    long = [system[0]]
    for one in sorted(known, key=lambda one: len(str(one["messages"])))[:2]:
        long += [one["messages"][-1], {"role": "assistant", "content": one["answer"]}]
    long.append({"role": "user", "content": task})
    drawn = {"temperature": 0.9, "seed": 7}
    return {
        "task": (task, {}),
        "system prompt": (system, {}),
        **{f"held-out {index}": (chats[index], {}) for index in (0, 1, 2, 5, 11, 23)},
        "thinking": (task, {"thinking": True}),
        "thinking, relaxed": (chats[3], {"thinking": True, "relaxed": True}),
        "thinking, relaxed far": (chats[3], {"thinking": True, "relaxed": Relaxation(closing, 50, 20.0)}),
        "thinking, schema": (chats[4], {"thinking": True, "schema": FORMS["schema"]}),
        "schema": (task, {"schema": FORMS["schema"]}),
        "schema, blanks": (chats[6], {"schema": FORMS["schema"], "whitespace": True}),
        "schema, drawn": (chats[7], {"schema": FORMS["schema"], **drawn}),
        "regex": (task, {"regex": FORMS["regex"]}),
        "lark": (task, {"grammar": FORMS["lark"], "max_new_tokens": 64}),
        "lark, drawn": (chats[8], {"grammar": FORMS["lark"], "max_new_tokens": 64, **drawn}),
        "drawn": (task, drawn),
        "drawn, hot": (chats[9], {"temperature": 1.6, "seed": 3, "max_new_tokens": 128}),
        "drawn, top_k, top_p": (chats[10], {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "seed": 11}),
        "stop text": (task, {"stop": ["pick", "}]"]}),
        "budget of one": (task, {"max_new_tokens": 1}),
        "raw": ("<|im_start|>user\nGoal: Tidy the", {"raw": True, "max_new_tokens": 48}),
        "ids": ([1 + 37 * i % 900 for i in range(100)], {"max_new_tokens": 48}),
        "long": (long, {"max_new_tokens": 96}),
        "tools": (chats[12], {"tools": [TOOL]}),
        "tool required": (chats[13], {"tools": [TOOL], "tool_choice": "required"}),
    }


def tiny_cases(vocabulary):
    """Token ids with their options: for pairs without a tokenizer."""

    def ids(count, step):
        return [1 + step * (i + 3) * (i + 1) % (vocabulary - 8) for i in range(count)]

    some = {"max_new_tokens": 40}
    return {
        **{f"{count} ids": (ids(count, 7 + count), some) for count in (1, 12, 31, 32, 33, 64, 150)},
        "drawn": (ids(20, 5), {**some, "temperature": 0.8, "seed": 1}),
        "drawn, hot": (ids(21, 11), {**some, "temperature": 2.0, "seed": 2}),
        "drawn, top_k": (ids(22, 13), {**some, "temperature": 1.5, "top_k": 12, "seed": 3}),
        "drawn, top_p": (ids(23, 17), {**some, "temperature": 1.5, "top_p": 0.7, "seed": 4}),
        "to the context's end": (ids(100, 3), {}),
    }
