"""The demo as a process: its command line, the arguments that it refuses at the start, and its end by a signal."""
from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import requests
from busy import until
from safetensors.torch import load_file, save_file
from webui_client import PICTURE, WebUI
from webui_process import ROOT, Ended, HostProcess, run_to_end

EMOJI_SD = ROOT / "lib_onediff" / "demo" / "emoji-sd"
UNET_WEIGHTS = Path("unet", "diffusion_pytorch_model.safetensors")
LONG = {**PICTURE, "steps": 150, "n_iter": 100, "width": 128, "height": 128}
SECONDS = 120


def assert_one_sentence(ended: Ended, *parts: str) -> None:
    """Assert exit code 1, and an output of one sentence that contains these parts."""
    assert ended.returncode == 1, ended.output
    lines = [line for line in ended.output.splitlines() if line != "Loading the model ..."]
    assert len(lines) == 1 and lines[0].endswith("."), ended.output
    for part in parts:
        assert part in lines[0]


def test_wrong_arguments_and_models_end_the_demo_with_one_sentence(tmp_path: Path) -> None:
    """Also a port that is in use. test_standalone_models.py tests model files that cannot be loaded."""
    model = tmp_path / "nothing.safetensors"
    assert_one_sentence(run_to_end("--port", "0", "--model", str(model)), "nothing.safetensors")
    assert_one_sentence(run_to_end("--port", "99999"), "99999")
    assert_one_sentence(run_to_end("--host", "no.such.host.invalid"), "no.such.host.invalid")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert_one_sentence(run_to_end("--port", str(port), from_nothing=True), str(port))
    ended = run_to_end("--gradio-auth", "nobody")
    assert ended.returncode == 2 and "user:password" in ended.output


def test_a_model_folder_of_any_name_is_used_and_options_are_stored(browser: Any, tmp_path: Path) -> None:
    """The folder's name is HTML, which the page shows as text. The demo is first started by the command line, as a user
    does (most tests use forks), and prints two lines. An option that one process sets is stored for the next."""
    folder = tmp_path / "<img src=x onerror=document.title='taken'>"
    shutil.copytree(EMOJI_SD, folder)
    arguments = ("--port", "0", "--data-dir", str(tmp_path / "data"), "--model", str(folder))
    host = HostProcess(*arguments, from_nothing=True)
    try:
        url = host.url()
        browser.open(url)
        assert folder.name in browser.text("onediff_header") and browser.driver.title == "OneDiff"
        assert requests.get(f"{url}/onediff/v1/status", timeout=60).json()["host"] == "standalone"
    finally:
        exit_code = host.stop()
    assert exit_code == 0
    assert len([line for line in host.lines if not line.startswith("OneDiff: ")]) == 2, host.output
    for expected in ("auto", "eager"):
        with HostProcess.running(*arguments) as host:
            webui = WebUI(host.url())
            assert webui.get("/sdapi/v1/options")["onediff_backend"] == expected
            webui.set_options(onediff_backend="eager")
    assert "Traceback" not in host.output


def test_nan_weights_and_a_broken_extension_script_do_not_stop_the_demo(tmp_path: Path) -> None:
    """scripts/onediff.py raises when it is loaded, and a weight of the UNet is NaN. The demo starts without the script.
    An image request gets status 500 and a sentence that names the network; other requests are answered."""
    copy = tmp_path / "checkout"
    model = tmp_path / "damaged-model"
    shutil.copytree(ROOT / "lib_onediff", copy / "lib_onediff", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "scripts").mkdir()
    (copy / "scripts" / "onediff.py").write_text("raise RuntimeError('broken on purpose')\n")
    shutil.copytree(EMOJI_SD, model)
    tensors = load_file(model / UNET_WEIGHTS)
    tensors["mid_block.resnets.0.conv1.weight"].fill_(float("nan"))
    save_file(tensors, model / UNET_WEIGHTS)
    host = HostProcess("--port", "0", "--data-dir", str(tmp_path / "data"), "--model", str(model), root=copy)
    try:
        url = host.url()
        assert requests.get(f"{url}/sdapi/v1/scripts", timeout=60).json() == {"txt2img": []}
        for _ in range(2):
            answer = requests.post(f"{url}/sdapi/v1/txt2img", json=PICTURE, timeout=300)
            assert answer.status_code == 500
            assert "The network produced numbers that are not finite" in answer.json()["detail"]
        assert requests.get(f"{url}/sdapi/v1/options", timeout=60).status_code == 200
    finally:
        host.stop()
    assert "the script onediff.py failed" in host.output
    assert "Traceback" not in host.output


# --- its end ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[HostProcess]:
    """A demo with its own folder for temporary files. The test's parameter: whether it is started by the command
    line."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    from_nothing = getattr(request, "param", False)
    host = HostProcess("--port", "0", "--data-dir", str(tmp_path / "data"), from_nothing=from_nothing)
    yield host
    host.process.kill()


def end(host: HostProcess, number: int, folder: Path) -> None:
    """End the demo by this signal. Asserts that it ends with exit code 0, without an error in its output, and leaves no
    temporary files of its page."""
    host.process.send_signal(number)
    try:
        exit_code = host.process.wait(30)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"the host goes on:\n{host.output}") from None
    assert exit_code == 0
    assert "Traceback" not in host.output and "ERROR" not in host.output, host.output
    assert len([line for line in host.lines if not line.startswith("OneDiff: ")]) <= 2, host.output
    assert list((folder / "temporary").glob("onediff-page-*")) == []


def test_a_signal_ends_the_demo_in_the_middle_of_images_streams_and_waiting_requests(
    browser: Any, host: HostProcess, tmp_path: Path
) -> None:
    """With images in progress, five open event streams, and a purge that waits for the images. For the conditions, see
    end()."""
    url = host.url()
    browser.open(url)
    for name, value in {"steps": 150, "batch_count": 100}.items():
        browser.type(f"#txt2img_{name} input[type=number]", value)
    browser.click("txt2img_generate")
    wait_until(lambda: state(url)["sampling_step"] > 0)
    streams = [requests.get(f"{url}/heartbeat/{number}", stream=True, timeout=SECONDS) for number in range(5)]
    for path, body in (("sdapi/v1/txt2img", LONG), ("onediff/v1/purge", {"all": True, "wait": 60})):
        threading.Thread(target=ask, args=(f"{url}/{path}", body), daemon=True).start()
    end(host, signal.SIGTERM, tmp_path)
    for stream in streams:
        stream.close()
    browser.driver.get("about:blank")


@pytest.mark.parametrize("host", [True], indirect=True, ids=["from nothing"])
def test_ctrl_c_ends_the_demo_while_the_model_is_being_loaded(host: HostProcess, tmp_path: Path) -> None:
    """The demo is started by the command line. For the conditions, see end()."""
    wait_until(lambda: any("Loading the model" in line for line in host.lines))
    end(host, signal.SIGINT, tmp_path)


def ask(url: str, body: dict[str, Any]) -> None:
    with suppress(requests.RequestException):
        requests.post(url, json=body, timeout=SECONDS)


def state(url: str) -> dict[str, Any]:
    return requests.get(f"{url}/sdapi/v1/progress", timeout=SECONDS).json()["state"]


def wait_until(holds: Callable[[], bool]) -> None:
    until(holds, "the host", SECONDS, 0.1)
