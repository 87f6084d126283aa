"""GET /onediff/v1/status, behind the same password as the WebUI's own API."""
from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from fastapi import Depends, FastAPI, HTTPException
from fastapi.security import HTTPBasic, HTTPBasicCredentials

PATH = "/onediff/v1/status"


def add_status_route(app: FastAPI, api_auth: str | None, status: Callable[[], dict[str, Any]]) -> None:
    """Serve status() as JSON from app. api_auth: the WebUI's --api-auth, "user:password,user:password", or None."""
    dependencies = [Depends(password_check(api_auth.split(",")))] if api_auth else []
    app.add_api_route(PATH, status, methods=["GET"], dependencies=dependencies, response_model=None)


def password_check(accounts: list[str]) -> Callable[[HTTPBasicCredentials], None]:
    """A FastAPI dependency that lets only these "user:password" accounts in."""

    def check(given: HTTPBasicCredentials = Depends(HTTPBasic())) -> None:  # noqa: B008
        presented = f"{given.username}:{given.password}".encode()
        if not any(secrets.compare_digest(presented, account.strip().encode()) for account in accounts):
            raise HTTPException(401, "Incorrect username or password.", headers={"WWW-Authenticate": "Basic"})

    return check
