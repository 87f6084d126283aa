"""What another site's page does to a standalone host: its page's own requests, and servers for such sites."""
from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import requests


class Site:
    """Another server on this machine, whose pages are all empty. asked: the paths that somebody has asked it for."""

    def __init__(self, server: ThreadingHTTPServer, asked: list[str]) -> None:
        self.asked, self.port = asked, server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def another_site() -> Iterator[Site]:
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>another site</title>")

        def log_message(self, *words: Any) -> None:
            """Not on the screen."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Site(server, asked)
    server.shutdown()
    server.server_close()


def event_of_page(url: str, elem_id: str, **values: Any) -> dict[str, Any]:
    """The body of the request that a click on a button sends, with other values for the inputs named by their ids."""
    config = requests.get(f"{url}/config", timeout=60).json()
    props = {component["id"]: component["props"] for component in config["components"]}
    button = next(number for number, own in props.items() if own.get("elem_id") == elem_id)
    event = next(event for event in config["dependencies"] if [button, "click"] in event["targets"])
    data = [values.get(props[number].get("elem_id"), props[number].get("value")) for number in event["inputs"]]
    return {"fn_index": event["id"], "session_hash": "another", "trigger_id": button, "data": data, "event_data": None}


def wait_for_event(url: str, session: str) -> str:
    """What the page's event stream says of everything that a session has asked for."""
    with requests.get(f"{url}/queue/data", params={"session_hash": session}, stream=True, timeout=60) as stream:
        return "\n".join(line.decode() for line in stream.iter_lines() if line)
