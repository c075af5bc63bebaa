"""Addresses of stores: what none may hold, and how one is shown."""

from __future__ import annotations

import re
from urllib.parse import unquote

from ..errors import InputError

#: What the name of a setting contains whose value must not be printed.
SECRET = re.compile(r"key|secret|token|password|sas|credential|\bsig(?:nature)?\b", re.IGNORECASE)
_PASSWORD = re.compile(r"^([A-Za-z0-9+.-]+:/*).*@", re.DOTALL)
_USER = re.compile(r"(:(?:/|%2F){2})[^\s/?#'\"]*?(?:@|%40)", re.IGNORECASE)
_SETTING = re.compile(rf"([?&;](?:[\w.-]|%\w\w)*?(?:{SECRET.pattern})[^=&\s]*=)[^&\s'\"]+", re.I)


def shown(address: str) -> str:
    """The address without what may be a secret in it: before an ``@``, or the value of a setting
    such as ``sig=``."""
    return shown_text(_PASSWORD.sub(r"\1…@", address))


def shown_text(text: str) -> str:
    """A text that may quote addresses, without the secrets in them."""
    return _SETTING.sub(r"\1…", _USER.sub(r"\1…@", text))


def check_address(address: str) -> None:
    """Raises InputError where two addresses with a scheme would be one place, or where a secret
    would be printed: addresses are."""
    place, _, query = address.partition("?")
    scheme = place.partition("://")[0]
    # 1. Clients of stores drop a fragment, resolve "..", and strip line ends and tabs.
    hint = "Write %23 for '#' in a name." if "#" in address else "Write the path without it."
    odd = next((mark for mark in "#\t\r\n" if mark in address), None)
    if odd is None and ".." in unquote(unquote(place)).replace("\\", "/").split("/"):
        odd = ".."
    if odd is None and scheme == "file" and "?" in address:
        odd, hint = "?", "Write %3F for '?' in a name."
    if odd is not None:
        raise InputError(f"{shown(address)!r} has {odd!r}, which no store keeps", hint=hint)
    # 2. Keys belong elsewhere.
    if scheme in ("file", "memory", "http", "https"):
        return
    names = [unquote(part.partition("=")[0]) for part in re.split("[&;?]", query)]
    held = next((name for name in names if SECRET.search(name)), None)
    netloc = place.partition("://")[2].partition("/")[0]
    users = "@:" if scheme in ("s3", "s3a", "gs", "az") else ":"
    if held is None and (set(unquote(netloc)) & set(users) or "@" in unquote(query)):
        held = "a user or a key before '@'"
    if held is not None:
        raise InputError(
            f"the address of a store holds {held}: addresses are printed and logged",
            hint="Give it in the environment, as an argument of open_store, or in a profile.",
        )
