"""Tokenizers with the added tokens and chat templates in the manner of Qwen3 and Qwen3.5, and one with every odd flag.

``reference`` renders and encodes as transformers does: the template's text goes through the tokenizer as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache

from grammar_support import compact
from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as HfTokenizer

from edge_dflash.text.template import ChatTemplate
from edge_dflash.text.tokenizer import Tokenizer

_PAIRS = ("object_ref", "box", "quad", "vision")
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *(f"<|{name}_{end}|>" for name in _PAIRS for end in ("start", "end")),
)
PADS = ("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
VISIBLE = (
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
)
AUDIO = ("<|audio_start|>", "<|audio_end|>", "<|audio_pad|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>")
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_LAST_QUERY = """\
{%- set ns = namespace(looking=true, last=messages | length - 1) %}
{%- for message in messages[::-1] %}
{%- set said = message.content | trim %}
{%- if ns.looking and message.role == 'user' %}
{%- if not (said.startswith('<tool_response>') and said.endswith('</tool_response>')) %}
{%- set ns.looking = false %}{%- set ns.last = messages | length - loop.index %}
{%- endif %}{%- endif %}
{%- endfor %}
"""
_THINKING = """\
{%- set thought = '' %}
{%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last %}{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}
{{- content }}
"""
_RESULT = """\
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' }}{{- content }}{{- '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
"""
_OPENING = """\
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""


def _template(tools: str, call: str, content: str) -> str:
    return (
        "{%- if tools %}{{- '<|im_start|>system\\n' }}"
        "{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}"
        f"{tools}"
        "{{- '<|im_end|>\\n' }}{%- elif messages[0].role == 'system' %}"
        "{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}\n"
        f"{_LAST_QUERY}"
        "{%- for message in messages %}\n"
        f"{{%- set content = {content} %}}\n"
        "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
        "{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}\n"
        f"{{%- elif message.role == 'assistant' %}}{_THINKING}"
        "{%- for call in message.tool_calls or [] %}"
        "{%- if loop.index0 or content %}{{- '\\n' }}{%- endif %}"
        "{%- if call.function %}{%- set call = call.function %}{%- endif %}"
        f"{call}{{%- endfor %}}{{{{- '<|im_end|>\\n' }}}}\n"
        f"{{%- elif message.role == 'tool' %}}{_RESULT}{{%- endif %}}\n"
        "{%- endfor %}\n"
        f"{_OPENING}"
    )


QWEN3 = _template(
    "{{- '# Tools\\nSignatures stand in <tools></tools>:\\n<tools>' }}"
    "{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}"
    '{{- \'\\n</tools>\\nCall so:\\n<tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>\' }}',
    '{{- \'<tool_call>\\n{"name": "\' + call.name + \'", "arguments": \' + (call.arguments | tojson) }}'
    "{{- '}\\n</tool_call>' }}",
    "message.content",
)
QWEN3_5 = _template(
    "{{- '# Tools\\n<tools>' }}{%- for tool in tools %}"
    "{{- '\\n<function>\\n<name>' + tool.function.name + '</name>' }}"
    "{%- for key, field in tool.function.parameters.properties | items %}"
    "{{- '\\n<' ~ key ~ '>' ~ (field | tojson) ~ '</' ~ key ~ '>' }}{%- endfor %}"
    "{{- '\\n<description>' ~ tool.function.description | trim ~ '</description>\\n</function>' }}{%- endfor %}"
    "{{- '\\n</tools>\\nCall so:\\n<tool_call>\\n<function=NAME>\\n</function>\\n</tool_call>' }}",
    "{{- '<tool_call>\\n<function=' + call.name + '>\\n' }}{%- for key, value in call.arguments | items %}"
    "{{- '<parameter=' + key + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' }}"
    "{%- endfor %}{{- '</function>\\n</tool_call>' }}",
    "message.content | trim",
)


@cache
def _words() -> str:
    corpus = [f"Bring the mug {i} from the shelf to the table, then go home. <think> end im start" for i in range(50)]
    corpus += [compact({"name": "move", "arguments": {"to": "shelf", "n": i}}) for i in range(50)]
    hf = HfTokenizer(models.BPE())
    hf.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated")
    hf.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    hf.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    hf.train_from_iterator(corpus, trainer)
    return hf.to_str()


def _made(tokens: Sequence[AddedToken], source: str) -> tuple[HfTokenizer, Tokenizer]:
    hf = HfTokenizer.from_str(_words())
    for token in tokens:
        (hf.add_special_tokens if token.special else hf.add_tokens)([token])
    return hf, Tokenizer(hf, ChatTemplate(source, {}, "test"), hf.token_to_id("<|im_end|>"))


def _tokens(special: Sequence[str], **flags: bool) -> list[AddedToken]:
    made = [AddedToken(name, special=True, normalized=False, **flags) for name in special]
    return made + [AddedToken(name, special=False, normalized=False, **flags) for name in VISIBLE]


@cache
def family(name: str) -> tuple[HfTokenizer, Tokenizer]:
    """The tokenizer of a family: the library's and ours."""
    if name == "odd":  # matches what normalization makes of a text, takes blanks along, has tokens that overlap
        hf, _ = _made([], "")
        state = json.loads(hf.to_str())
        state["normalizer"] = json.loads(normalizers.Sequence([normalizers.NFKC()]).__getstate__())
        hf = HfTokenizer.from_str(json.dumps(state))
        hf.add_special_tokens([AddedToken(token, special=True, normalized=True) for token in SPECIAL])
        hf.add_tokens([AddedToken(t, special=False, normalized=True, lstrip=True, rstrip=True) for t in VISIBLE])
        hf.add_special_tokens([AddedToken("end|>x", special=True)])
        hf.add_tokens([AddedToken("mug", special=False, single_word=True), AddedToken("  ", special=False)])
        return hf, Tokenizer(hf, ChatTemplate(QWEN3, {}, "test"), hf.token_to_id("<|im_end|>"))
    if name == "qwen3":
        return _made(_tokens((*SPECIAL, *PADS)), QWEN3)
    return _made(_tokens((*SPECIAL, *PADS, *AUDIO)), QWEN3_5)


@cache
def _compiled(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(source)


def reference_text(name: str, messages: Sequence[Mapping[str, object]], **variables: object) -> str:
    """What the template writes."""
    template = _compiled(QWEN3_5 if name == "qwen3_5" else QWEN3)
    return template.render(messages=messages, add_generation_prompt=True, **variables)


def reference(name: str, messages: Sequence[Mapping[str, object]], **variables: object) -> tuple[int, ...]:
    """Ids as transformers makes them."""
    return tuple(family(name)[0].encode(reference_text(name, messages, **variables), add_special_tokens=False).ids)
