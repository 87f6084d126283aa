"""Requests to the REST API, made up by hypothesis: meant well, half right, and nonsense."""
from __future__ import annotations

import json
from typing import Any, NamedTuple
from urllib.parse import quote

from api_builders import basic
from hypothesis import strategies as st

ROWS = [("512x512", "SD1"), ("768x512", "SD1"), ("512x512", "SDXL")]
FIELDS = ("sizes", "tokens", "order", "resolutions", "resolution", "model", "disk", "all", "wait", "pinned", "width")
# The only account of the host.
PASSWORD = basic("ann:one")
ENDPOINTS = ("status", "shapes", "jobs", "prewarm", "purge", "pin", "release", "nothing", "jobs/1/x")
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD")

words = st.text(st.characters(), max_size=30)  # Halves of surrogate pairs among them.
scalars = (
    st.none() | st.booleans() | st.integers() | st.integers(-(10**40), 10**40) | st.floats() | words
    | st.sampled_from(["512x512", "SD1", "64x64 x2", "first", 77, 8, 10**400])
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words | st.sampled_from(FIELDS), inner, max_size=4),
    max_leaves=12,
)


def often(good: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Mostly what is meant, so that requests get as far as to do something."""
    return st.sampled_from([True, True, True, False]).flatmap(lambda is_good: good if is_good else anything)


pixels = st.integers(8, 64).map(lambda eighth: 8 * eighth)
size = st.fixed_dictionaries(
    {"width": often(pixels), "height": often(pixels)}, optional={"batch": often(st.integers(1, 4))}
)
resolution = st.sampled_from([*(name for name, _ in ROWS), "8x8"])
model = st.sampled_from(["SD1", "SDXL", "nobody"])
wait = often(st.integers(1, 5))
BODIES = {
    "prewarm": st.fixed_dictionaries({"sizes": often(
        st.lists(size, min_size=1, max_size=3) | st.builds("{}x{}, 64x64 x2".format, pixels, pixels))},
        optional={"tokens": often(st.sampled_from([77, 154])), "order": often(st.sampled_from(["first", "last"]))}),
    "purge": st.fixed_dictionaries({}, optional={
        "resolutions": often(st.lists(resolution, min_size=1, max_size=2)), "model": often(model),
        "disk": often(st.booleans()), "all": often(st.booleans()), "wait": wait}),
    "pin": st.fixed_dictionaries(
        {"resolution": often(resolution), "model": often(model)}, optional={"pinned": often(st.booleans())}),
    "release": st.fixed_dictionaries({}, optional={"wait": wait}),
}


class Request(NamedTuple):
    method: str
    path: str
    body: bytes
    headers: dict[str, str]

    @property
    def is_trusted(self) -> bool:
        """Whether it comes with a password, and not from another site."""
        foreign = self.headers.get("Sec-Fetch-Site") == "cross-site" or "Origin" in self.headers
        return self.headers.get("Authorization") == PASSWORD["Authorization"] and not foreign


JSON = {"Content-Type": "application/json"}
kinds = st.sampled_from([*[JSON] * 6, {"Content-Type": "text/plain"}, {"Content-Type": "multipart/form-data"}, {}])
people = st.sampled_from([
    *[PASSWORD] * 8, {}, basic("ann:two"), {**PASSWORD, "Sec-Fetch-Site": "cross-site"},
    {**PASSWORD, "Origin": "https://evil.example"}, {"Cookie": "access-token-unsecure=x"},
])
headers = st.builds(lambda kind, person: {**kind, **person}, kinds, people)


def posted(name: str) -> st.SearchStrategy[Request]:
    """Requests to one endpoint, mostly with a body that it takes."""
    written = often(BODIES[name]).map(lambda body: json.dumps(body).encode())
    body = st.sampled_from([True, True, True, True, False]).flatmap(lambda is_json: written if is_json else st.binary())
    return st.builds(Request, st.just("POST"), st.just(name), body, headers)


quoted = words.map(lambda text: quote(text, "", errors="surrogatepass"))
numbers = (st.integers(1, 60) | st.integers()).map(str) | quoted
requests = st.one_of(
    *map(posted, BODIES),
    st.builds(lambda method, number, given: Request(method, f"jobs/{number}", b"", given),
              st.sampled_from(["GET", "DELETE"]), numbers, headers),
    st.builds(lambda path, query, given: Request("GET", f"{path}?model={query}", b"", given),
              st.sampled_from(["shapes", "status", "jobs"]), quoted | model, headers),
    st.builds(lambda method, path, body, given: Request(method, path, body, given),
              st.sampled_from(METHODS), st.sampled_from(ENDPOINTS), st.binary(max_size=20), headers),
)
