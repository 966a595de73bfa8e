"""Tools of a chat, and which of them is to be called."""

from __future__ import annotations

from edge_dflash.decode.options import PlanOptions
from edge_dflash.serve.fields import Fields

_FUNCTION = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "parameters": {"type": ["object", "null"]}},
    "required": ["name"],
}
_TOOL = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "function": _FUNCTION},
    "required": ["function"],
}
_TOOL_CHOICE = {
    "anyOf": [
        {"enum": ["auto", "none", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}},
                    "required": ["name"],
                    "additionalProperties": False,
                },
            },
            "required": ["type", "function"],
            "additionalProperties": False,
        },
    ]
}


def read_tools(fields: Fields, options: PlanOptions) -> None:
    """Read ``tools`` and ``tool_choice``. Raises Refusal."""
    tools = fields.array("tools", facts={"items": _TOOL})
    for index, tool in enumerate(tools or ()):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            fields.fail(f"tools[{index}]", tool, 'give {"type": "function", "function": {"name": ...}}')
        if not isinstance(function.get("name"), str) or not isinstance(function.get("parameters"), dict | None):
            fields.fail(f"tools[{index}].function", function, "give it a name, and an object as parameters")
    options["tool_choice"] = choice = _tool_choice(fields)
    names = [tool["function"]["name"] for tool in tools or ()]
    if choice not in ("auto", "none") and not names:
        fields.fail("tool_choice", choice, "no tools are given: give tools, or auto")
    if choice not in ("auto", "none", "required") and choice not in names:
        fields.fail("tool_choice", choice, f"give auto, none, required, or the name of a tool that is given: {names}")
    if tools:
        options["tools"] = tools
    accepted = (True,) if choice in ("auto", "none") else (True, False)  # a forced call is one call
    fields.only("parallel_tool_calls", *accepted, why="the model decides how many tools it calls; leave it out")
    fields.only("functions", why="give tools instead")
    fields.only("function_call", why="give tool_choice instead")


def _tool_choice(fields: Fields) -> str:
    """A word of the API, or the name of a tool."""
    choice = fields.take("tool_choice", _TOOL_CHOICE)
    if choice is None or choice in ("auto", "none", "required"):
        return choice or "auto"
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or choice != {"type": "function", "function": {"name": name}}:
        wanted = 'give auto, none, required, or {"type": "function", "function": {"name": ...}}'
        fields.fail("tool_choice", choice, wanted)
    if name in ("auto", "none", "required"):
        fields.fail("tool_choice", choice, "a tool of this name cannot be chosen; name it otherwise")
    return name
