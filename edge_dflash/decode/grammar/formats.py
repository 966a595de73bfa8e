"""Formats and encodings of JSON values, as what a grammar can enforce: patterns of texts, ranges of whole numbers."""

from __future__ import annotations

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"  # 0001 to 9999
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"  # 04, 08, ..., 96
_LEAP = f"(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)"
_MONTHS = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_DAY = f"(?:{_MONTHS}|02-(?:0[1-9]|1[0-9]|2[0-8]))"
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP}-02-29)"
_TIME = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"

_N = "[0-9]{1,9}"  # digits of one part of a duration
_CLOCK = f"(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_DAYS = f"(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"
_DURATION = f"P(?:{_DAYS}(?:T{_CLOCK})?|T{_CLOCK}|{_N}W)"

_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOST = f"{_LABEL}(?:\\.{_LABEL})*"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = f"(?:{_BYTE}\\.){{3}}{_BYTE}"
_ATEXT = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]"
_LOCAL = f"(?:{_ATEXT}{{1,64}}|{_ATEXT}{{1,15}}(?:\\.{_ATEXT}{{1,15}}){{1,3}})"  # at most 64 characters
_EMAIL = f"{_LOCAL}@(?:{_HOST}|\\[{_IPV4}\\])"

_BASE64 = "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/][AQgw]==|[A-Za-z0-9+/]{2}[AEIMQUYcgkosw048]=)?"

_HEX = "[0-9a-fA-F]"
_UUID = f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}"
_H16 = f"{_HEX}{{1,4}}"


def _ipv6() -> str:
    """Eight groups; or fewer, with ``::`` in place of at least one (RFC 4291)."""
    forms = [f"(?:{_H16}:){{7}}{_H16}", f"::(?:{_H16}(?::{_H16}){{0,6}})?"]
    for before in range(1, 8):
        left = f"{_H16}(?::{_H16}){{{before - 1}}}" if before > 1 else _H16
        after = 7 - before
        forms.append(f"{left}::" + (f"(?:{_H16}(?::{_H16}){{0,{after - 1}}})?" if after else ""))
    return "(?:" + "|".join(forms) + ")"


_PCHAR = "(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})"
_USER = "(?:[a-zA-Z0-9._~!$&'()*+,;=:-]|%[0-9a-fA-F]{2})"
_NAME = "(?:[a-zA-Z0-9._~!$&'()*+,;=-]|%[0-9a-fA-F]{2})"
_PORT = "(?:6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5][0-9]{4}|[1-9]?[0-9]{1,3})"
_AUTHORITY = f"(?:{_USER}*@)?(?:\\[{_ipv6()}\\]|{_NAME}*)(?::{_PORT})?"
_URI = (
    f"[a-zA-Z][a-zA-Z0-9+.-]*:(?://{_AUTHORITY}(?:/{_PCHAR}*)*|/(?:{_PCHAR}+(?:/{_PCHAR}*)*)?|{_PCHAR}+(?:/{_PCHAR}*)*)?"
    f"(?:\\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
)

FORMATS: dict[str, tuple[str, ...]] = {
    "date-time": (f"{_DATE}T{_TIME}",),
    "date": (_DATE,),
    "time": (_TIME,),
    "duration": (_DURATION,),
    "email": (_EMAIL,),
    "hostname": (_HOST, ".{1,253}"),
    "ipv4": (_IPV4,),
    "ipv6": (_ipv6(),),
    "uuid": (_UUID,),
    # Of RFC 9562, by version: Pydantic's.
    **{f"uuid{n}": (f"{_HEX}{{8}}-{_HEX}{{4}}-{n}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}",) for n in range(1, 9)},
    "uri": (_URI,),
    "base64": (_BASE64,),  # Pydantic's
    "byte": (_BASE64,),  # OpenAPI's
}
"""Name of a format of JSON strings: what the whole string matches, all of them, in the syntax of Rust's regex crate.

None is looser than what Python's standard library and the RFC both read: no leap second (RFC 3339 allows 60,
``datetime`` does not), no 29 February of other years, no year 0, capital T and Z, and a bound wherever digits could go
on for ever.
"""

ENCODINGS: dict[str, tuple[str, ...]] = {"base64": (_BASE64,), "base16": ("(?:[0-9A-F]{2})*",)}
"""``contentEncoding``: what the whole string matches (RFC 4648, with padding and without line breaks)."""

INTEGERS: dict[str, tuple[int, int]] = {
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)},
}
"""Name of a format of JSON numbers: the least and the largest whole number."""

TEXT_HINTS = frozenset(("password", "binary", "path", "file-path", "directory-path"))  # OpenAPI's, Pydantic's: any text
NUMBER_HINTS = frozenset(("float", "double"))  # all numbers that are written are within both ranges
BYTE_HINTS = frozenset(("8bit", "binary"))  # encodings that leave a text as it is (RFC 2045)

WITHOUT_LOOKING = {
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        "^(?:[A-Za-z0-9_'+-]+\\.)*[A-Za-z0-9_'+-]*[A-Za-z0-9_+-]@(?:[A-Za-z0-9][A-Za-z0-9-]*\\.)+[A-Za-z]{2,}$"
    ),
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": f"^{_DURATION}$",
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": "^[+-]?(?:[0-9]+\\.?[0-9]*|\\.[0-9]+)$",
}
"""Patterns with look-around that Zod (email, duration) and Pydantic (Decimal) write, as ones without, none looser."""
