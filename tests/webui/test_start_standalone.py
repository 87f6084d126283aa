"""Starting the standalone host: models that are not there or not usable, ports that are taken."""
from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import requests
from safetensors.torch import load_file, save_file
from webui_client import PICTURE, WebUI
from webui_process import ROOT, Ended, HostProcess, run_to_end

EMOJI_SD = ROOT / "lib_onediff" / "demo" / "emoji-sd"
UNET_WEIGHTS = Path("unet", "diffusion_pytorch_model.safetensors")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model in diffusers' layout."""
    return Path(shutil.copytree(EMOJI_SD, tmp_path_factory.mktemp("models") / "small-model"))


def assert_one_sentence(ended: Ended, *parts: str) -> None:
    assert ended.returncode == 1, ended.output
    lines = [line for line in ended.output.splitlines() if line != "Loading the model ..."]
    assert len(lines) == 1 and lines[0].endswith("."), ended.output
    for part in parts:
        assert part in lines[0]


def test_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    """Which there are: test_standalone_models.py."""
    model = tmp_path / "nothing.safetensors"
    assert_one_sentence(run_to_end("--port", "0", "--model", str(model)), "nothing.safetensors")


def test_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert_one_sentence(run_to_end("--port", str(port), from_nothing=True), str(port))


def test_port_and_host_that_do_not_exist() -> None:
    assert_one_sentence(run_to_end("--port", "99999"), "99999")
    assert_one_sentence(run_to_end("--host", "no.such.host.invalid"), "no.such.host.invalid")


def test_model_folder_is_used(model_folder: Path, tmp_path: Path) -> None:
    """By the command line, as a user starts it; most tests' hosts are forks."""
    host = HostProcess("--port", "0", "--data-dir", str(tmp_path), "--model", str(model_folder), from_nothing=True)
    try:
        url = host.url()
        assert ">small-model<" in requests.get(url, timeout=60).text.replace("\\u003c", "<").replace("\\u003e", ">")
        assert WebUI(url).status()["host"] == "standalone"
    finally:
        exit_code = host.stop()
    assert exit_code == 0
    assert len([line for line in host.lines if not line.startswith("OneDiff: ")]) == 2, host.output


def test_name_of_a_model_is_shown_as_text(browser: Any, model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "<img src=x onerror=document.title='taken'>"
    shutil.copytree(model_folder, folder)
    with HostProcess.running("--port", "0", "--data-dir", str(tmp_path / "data"), "--model", str(folder)) as host:
        browser.open(host.url())
        assert folder.name in browser.text("onediff_header")
        assert browser.driver.title == "OneDiff"


def test_nan_weights_give_a_sentence_and_the_host_lives_on(model_folder: Path, tmp_path: Path) -> None:
    damaged_folder = Path(shutil.copytree(model_folder, tmp_path / "damaged-model"))
    tensors = load_file(damaged_folder / UNET_WEIGHTS)
    tensors["mid_block.resnets.0.conv1.weight"].fill_(float("nan"))
    save_file(tensors, damaged_folder / UNET_WEIGHTS)
    host = HostProcess("--port", "0", "--data-dir", str(tmp_path), "--model", str(damaged_folder))
    try:
        webui = WebUI(host.url())
        for _ in range(2):
            answer = webui.post("/sdapi/v1/txt2img", PICTURE)
            assert answer.status_code == 500
            assert "UNet produced numbers that are not finite" in answer.json()["detail"]
        assert webui.get("/internal/ping") == {}
    finally:
        host.stop()
    assert "Traceback" not in host.output


def test_broken_extension_does_not_stop_the_host(tmp_path: Path) -> None:
    """The host must start and make pictures when scripts/onediff.py cannot be loaded."""
    copy = tmp_path / "checkout"
    shutil.copytree(ROOT / "lib_onediff", copy / "lib_onediff", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "scripts").mkdir()
    (copy / "scripts" / "onediff.py").write_text("raise RuntimeError('broken on purpose')\n")
    host = HostProcess("--port", "0", "--data-dir", str(tmp_path), root=copy)
    try:
        webui = WebUI(host.url())
        assert webui.get("/sdapi/v1/scripts") == {"txt2img": [], "img2img": []}
        assert webui.txt2img().image.size == (64, 64)
    finally:
        host.stop()
    assert "Error loading script: onediff.py" in host.output
    assert "Traceback" not in host.output
