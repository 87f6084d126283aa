"""/docs: every endpoint of the API on one page. FastAPI's own page would fetch its scripts from another server."""
from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, JSONResponse

STYLE = """
:root { color-scheme: light dark } body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto }
code { font-family: ui-monospace, monospace } h2 { margin: 2em 0 0 } td { padding: 0 1em 0 0; vertical-align: top }
"""


def add_docs(app: FastAPI, protection: list[Any]) -> None:
    """Serve /docs and /openapi.json for the endpoints that app has when they are asked for.

    protection: the dependencies of the endpoints themselves.
    """
    hidden: dict[str, Any] = {"include_in_schema": False, "dependencies": protection}
    app.add_api_route("/docs", lambda: HTMLResponse(page_of(app.openapi())), **hidden)
    app.add_api_route("/openapi.json", lambda: JSONResponse(app.openapi()), **hidden)


def page_of(described: dict[str, Any]) -> str:
    """The page of an OpenAPI description."""
    title = html.escape(described["info"]["title"])
    endpoints = "".join(
        endpoint_html(f"{method.upper()} {path}", told, described)
        for path, methods in described["paths"].items() for method, told in methods.items()
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}: API</title><style>{STYLE}</style>'
        f'<h1>{title}: API</h1><p><a href="openapi.json">openapi.json</a></p>{endpoints}'
    )


def endpoint_html(name: str, told: dict[str, Any], described: dict[str, Any]) -> str:
    """One endpoint: what it does, what it takes and what it answers."""
    rows = [*taken(told, described), *answered(told)]
    cells = "".join(f"<tr><td><code>{html.escape(what)}</code><td>{html.escape(meaning)}" for what, meaning in rows)
    name, summary, text = (html.escape(part) for part in (name, told["summary"], told.get("description", "")))
    return f"<h2><code>{name}</code></h2><p><b>{summary}</b><p>{text}<table>{cells}</table>"


def taken(told: dict[str, Any], described: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, meaning) of each parameter and of each field of the body."""
    for parameter in told.get("parameters", ()):
        yield parameter["name"], parameter.get("description", "")
    body = told.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    name = (body.get("$ref") or (body.get("allOf") or [{}])[0].get("$ref", "")).rpartition("/")[2]
    for field, schema in described.get("components", {}).get("schemas", {}).get(name, {}).get("properties", {}).items():
        yield field, schema.get("description", "")


def answered(told: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(status, meaning) of each answer."""
    for status, answer in told["responses"].items():
        yield status, answer["description"]
