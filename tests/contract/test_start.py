"""Which Python modules a WebUI imports when it starts with OneDiff, and whether it loads a checkpoint then."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("gradio")

from contract_hosts import running
from runtime_fixtures import fresh_runtime  # noqa: F401

from lib_onediff.hosts import this_webui

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "scripts" / "onediff.py"
# Modules that are needed only once a model is served, compiled or queried by the API. The page needs none of them.
FOR_LATER = (
    "diffusers", "transformers", "torch._inductor", "torch._dynamo", "torch.onnx", "triton", "sympy", "oneflow",
    "skimage", "scipy", "lib_onediff.api", "lib_onediff.bench", "lib_onediff.devices.oneflow.operators",
)
START = """
import json, sys
import gradio, PIL.Image, torch
from lib_onediff.demo.modules import paths, script_callbacks, scripts
from lib_onediff.demo.modules import modules_importable

paths.data_path, script = sys.argv[1:]
before = set(sys.modules)
with modules_importable():
    module = scripts.load_module(script)
    script_callbacks.call_all("before_ui")
    script_callbacks.call_all("ui_settings")
    with gradio.Blocks():
        page = module.OneDiffScript()
        page.is_img2img = False
        assert len(page.ui(False)) == 3
    assert len(script_callbacks.call_all("ui_tabs")) == 1 and not module.guard.faults, module.guard.faults
    print(json.dumps(sorted(set(sys.modules) - before)))
    module.stop()
"""


@pytest.mark.parametrize(("name", "at_start"), [
    ("a1111", True), ("forge", False), ("neo", False), ("reforge", True), ("classic", False),
])
def test_loads_at_start_is_true_in_the_webuis_that_load_a_checkpoint_when_they_start(
    name: str, at_start: bool, fresh_runtime: None, monkeypatch: pytest.MonkeyPatch,  # noqa: F811
) -> None:
    """at_start: what loads_at_start() of the WebUI's adapter returns. The other WebUIs load the checkpoint with the
    first image, and so does A1111 with --skip-load-model-at-start."""
    with running(name) as host:
        adapter = this_webui()
        assert adapter.loads_at_start() is at_start
        if name == "a1111":
            monkeypatch.setattr(host.module("modules.shared").cmd_opts, "skip_load_model_at_start", True, raising=False)
            assert adapter.loads_at_start() is False


def loaded_at_start(data: Path, before: str = "") -> list[str]:
    """The Python modules that a WebUI imports when it starts with OneDiff. before: Python code that runs first."""
    run = subprocess.run(
        [sys.executable, "-c", before + START, str(data), str(SCRIPT)], cwd=REPOSITORY, capture_output=True, text=True,
        timeout=300, check=False,
    )
    assert run.returncode == 0, run.stderr
    loaded: list[str] = json.loads(run.stdout.splitlines()[-1])
    assert "lib_onediff.ui.accordion" in loaded
    return loaded


def test_the_webui_starts_with_onediff_while_both_triton_and_scikit_image_are_missing(tmp_path: Path) -> None:
    """OneDiff's script must load, and build its accordion and its tab, without an exception or a fault. Triton is
    missing on Windows, on a Mac and with torch's CPU builds; scikit-image is optional."""
    loaded_at_start(tmp_path, "import sys\nsys.modules.update(triton=None, skimage=None)\n")


def test_the_webui_imports_no_module_at_its_start_that_only_a_loaded_model_needs(tmp_path: Path) -> None:
    """FOR_LATER has these modules: those that are needed only once a model is served or compiled, or the API is
    used."""
    loaded = loaded_at_start(tmp_path)
    heavy = [name for name in loaded if any(name == late or name.startswith(f"{late}.") for late in FOR_LATER)]
    assert heavy == []
