"""Names and passwords as HTTP sends them."""
# No "from __future__ import annotations": of an object that is called, FastAPI reads no annotation that is text.
import base64

from fastapi import HTTPException, Request
from fastapi.security import HTTPBasic, HTTPBasicCredentials


class Basic(HTTPBasic):
    """HTTP's accounts with any letters: FastAPI reads ASCII alone, and lets nobody in whose password has others."""

    async def __call__(self, request: Request) -> HTTPBasicCredentials:  # type: ignore[override]
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        try:
            sent = base64.b64decode(given, validate=True) if scheme.lower() == "basic" else b""
        except ValueError:
            sent = b""
        try:
            account = sent.decode()
        except UnicodeDecodeError:
            # As older programs send them.
            account = sent.decode("latin-1")
        user, colon, password = account.partition(":")
        if not colon:
            raise HTTPException(401, "Not authenticated.", headers={"WWW-Authenticate": 'Basic charset="UTF-8"'})
        return HTTPBasicCredentials(username=user, password=password)
