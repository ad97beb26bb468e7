"""What clients do with stored responses: look at one, list the items it was asked with, delete it.

Plain functions of the store and a query; they know no engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from quickdraft.errors import BadParameter
from quickdraft.server.errors import ApiError
from quickdraft.server.response_store import ResponseStore

_MOST_ITEMS: Final = 100


def retrieve(store: ResponseStore, response_id: str, query: Mapping[str, str]) -> dict[str, Any]:
    """The response as it was answered."""
    _only(query, {"stream": ("false",)})
    return store.get(response_id).response


def delete(store: ResponseStore, response_id: str, query: Mapping[str, str]) -> dict[str, Any]:
    """Forget it."""
    _only(query, {})
    store.delete(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


def input_items(store: ResponseStore, response_id: str, query: Mapping[str, str]) -> dict[str, Any]:
    """The conversation that the response answered, its newest item first unless `order` is asc; at most
    `limit` (20) items that come `after` the item of that id."""
    _only(query, {"order": ("asc", "desc"), "limit": None, "after": None})
    items: Sequence[dict[str, Any]] = store.get(response_id).items
    if query.get("order", "desc") == "desc":
        items = items[::-1]
    limit = query.get("limit", "20")
    if not limit.isdecimal() or not 1 <= int(limit[:4]) <= _MOST_ITEMS:
        raise BadParameter("limit", got=repr(limit[:40]), expected=f"a number in 1..{_MOST_ITEMS}")
    if "after" in query:
        ids = [item["id"] for item in items]
        if query["after"] not in ids:
            raise BadParameter("after", got=repr(query["after"][:80]), expected="the id of an input item")
        items = items[ids.index(query["after"]) + 1 :]
    shown = items[: int(limit)]
    return {
        "object": "list",
        "data": list(shown),
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(items) > len(shown),
    }


def _only(query: Mapping[str, str], known: Mapping[str, Sequence[str] | None]) -> None:
    """ApiError for a parameter that is not known, or has another value than those."""
    for name, value in query.items():
        allowed = known.get(name, ())
        if allowed is not None and value not in allowed:
            raise ApiError(
                f"the query parameter {name[:80]!r} is not supported with this value; got {value[:80]!r}",
                param=name[:80],
                code="unsupported_parameter",
            )
