"""The models (checkpoints, LoRAs, VAEs, ...) that the tests need. Each has a role; the WebUI's model for it is found by
its name, or named on the command line."""
from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from webui_client import WebUI

CHECKPOINTS = "checkpoint"
LORAS = "LoRA"
VAES = "VAE"
CONTROLNETS = "ControlNet"
HYPERNETWORKS = "hypernetwork"
# For each role: the kind of model, and a pattern for its name, with or without the file's ending.
# A host may load twin and twin-b, two checkpoints of one configuration, into the same module.
ROLES = {
    "sd15": (CHECKPOINTS, r"(tiny|rand)[-_]sd15"),
    "sd15-b": (CHECKPOINTS, r"(tiny|rand)[-_]sd15[-_]b"),
    "inpaint": (CHECKPOINTS, r"(tiny|rand)[-_]sd15[-_]inpaint(ing)?"),
    # v-prediction is in the checkpoint's .yaml.
    "sd15-v": (CHECKPOINTS, r"(tiny|rand)[-_]sd15[-_]v"),
    "sdxl-v": (CHECKPOINTS, r"(tiny|rand)[-_]sdxl[-_]v"),
    "sdxl-inpaint": (CHECKPOINTS, r"(tiny|rand)[-_]sdxl[-_]inpaint(ing)?"),
    "twin": (CHECKPOINTS, r"twin[-_]sd15\.safetensors"),
    "twin-b": (CHECKPOINTS, r"twin[-_]sd15\.ckpt"),
    "sdxl": (CHECKPOINTS, r"(tiny|rand)[-_]sdxl"),
    "sdxl-b": (CHECKPOINTS, r"(tiny|rand)[-_]sdxl[-_]b"),
    "refiner": (CHECKPOINTS, r"(tiny|rand)[-_](sdxl[-_])?refiner"),
    "sd2": (CHECKPOINTS, r"(tiny|rand)[-_]sd21?"),
    "lora-a": (LORAS, r"(tiny|rand)([-_]sd15)?[-_]lora([-_]a)?"),
    "lora-b": (LORAS, r"(tiny|rand)([-_]sd15)?[-_]lora[-_]b"),
    "locon": (LORAS, r"(tiny|rand)([-_]sd15)?[-_]locon"),
    "sdxl-lora": (LORAS, r"(tiny|rand)[-_]sdxl[-_]lora([-_]a)?"),
    "vae": (VAES, r"(tiny|rand)([-_]sd15)?[-_]vae.*"),
    "controlnet": (CONTROLNETS, r"(tiny|rand)[-_]control(net)?[-_]sd15"),
    "controlnet-sdxl": (CONTROLNETS, r"(tiny|rand)[-_]control(net)?[-_]sdxl"),
    "t2i-adapter": (CONTROLNETS, r"(tiny|rand)[-_]t2i[-_]?adapter[-_]sd15"),
    "ip-adapter": (CONTROLNETS, r"ip[-_]adapter[-_]sd15"),
    "ip-adapter-plus": (CONTROLNETS, r"ip[-_]adapter[-_]plus[-_]sd15"),
    "ip-adapter-sdxl": (CONTROLNETS, r"ip[-_]adapter[-_]sdxl"),
    "ip-adapter-plus-sdxl": (CONTROLNETS, r"ip[-_]adapter[-_]plus[-_]sdxl"),
    "lllite": (CONTROLNETS, r".*lllite[-_]sd15"),
    "lllite-sdxl": (CONTROLNETS, r".*lllite[-_]sdxl"),
    "hypernetwork": (HYPERNETWORKS, r"(tiny|rand).*"),
}


def without_hash(name: str) -> str:
    return re.sub(r"\s*\[[0-9a-f]+\]$", "", name)


def stem(name: str) -> str:
    """A model's name without its folder, hash and ending."""
    bare = without_hash(name).replace("\\", "/").rsplit("/", 1)[-1]
    return re.sub(r"\.(safetensors|ckpt|pt|pth|bin)$", "", bare)


class Models:
    """The WebUI's models by their roles in the tests. named: the names given on the command line, by role; models of
    other roles are found by the patterns of ROLES."""

    def __init__(self, webui: WebUI, named: dict[str, str]) -> None:
        unknown = sorted(set(named) - set(ROLES))
        if unknown:
            raise pytest.UsageError(f"there is no role {unknown[0]!r}; the roles are {', '.join(ROLES)}")
        self.webui = webui
        self.named = named
        self._listed: dict[str, list[str]] = {}

    def need(self, role: str) -> str:
        """The WebUI's name of the model for this role; skips the test if there is none."""
        kind, pattern = ROLES[role]
        names = self._names(kind)
        wanted = self.named.get(role)
        for name in names:
            called = (without_hash(name), stem(name))
            if wanted in called or (not wanted and any(re.fullmatch(pattern, each, re.I) for each in called)):
                return name
        if wanted:
            raise pytest.UsageError(f"the WebUI has no {kind} {wanted!r}; it has {', '.join(names) or 'none'}")
        pytest.skip(f"this WebUI has no {kind} for the role {role}: give one with --model {role}=NAME")

    def use(self, role: str) -> str:
        """Have the WebUI load the checkpoint of this role; returns its name."""
        name = self.need(role)
        if not self.webui.is_standalone and without_hash(self.loaded()) != name:
            self.webui.set_options(sd_model_checkpoint=name)
        return name

    def loaded(self) -> str:
        """The checkpoint that the WebUI is set to; "" if none was set yet."""
        return self.webui.get("/sdapi/v1/options").get("sd_model_checkpoint") or ""

    def _names(self, kind: str) -> list[str]:
        if kind not in self._listed:
            self._listed[kind] = LISTS[kind](self.webui)
        return self._listed[kind]


def asked(path: str, field: str, within: str | None = None) -> Callable[[WebUI], list[str]]:
    """A function that returns the names in one of a WebUI's lists; [] if the WebUI has no such list.

    path: the path of the request. field: the name's field in each item. within: the field of the answer that has the
    list; None: the answer is the list.
    """

    def names(webui: WebUI) -> list[str]:
        if not webui.has(path):
            return []
        body: Any = webui.get(path)
        return [item if isinstance(item, str) else item[field] for item in (body[within] if within else body)]

    return names


def checkpoints(webui: WebUI) -> list[str]:
    """File names of checkpoints. For the demo, its one small model counts as tiny-sd15, whatever its name is."""
    if webui.is_standalone:
        return ["tiny-sd15"]
    return [without_hash(title) for title in asked("/sdapi/v1/sd-models", "title")(webui)]


def vaes(webui: WebUI) -> list[str]:
    return asked("/sdapi/v1/sd-modules" if webui.kind == "forge" else "/sdapi/v1/sd-vae", "model_name")(webui)


LISTS: dict[str, Callable[[WebUI], list[str]]] = {
    CHECKPOINTS: checkpoints,
    LORAS: asked("/sdapi/v1/loras", "name"),
    VAES: vaes,
    CONTROLNETS: asked("/controlnet/model_list", "model", within="model_list"),
    HYPERNETWORKS: asked("/sdapi/v1/hypernetworks", "name"),
}


def models_named(file: str | None, pairs: list[str]) -> dict[str, str]:
    """Names by role, from --models FILE.json and --model ROLE=NAME; the latter overrides the former."""
    named: dict[str, str] = json.loads(Path(file).read_text(encoding="utf-8")) if file else {}
    for pair in pairs:
        role, equals, name = pair.partition("=")
        if not equals:
            raise pytest.UsageError(f"--model takes ROLE=NAME, not {pair!r}")
        named[role] = name
    return named
