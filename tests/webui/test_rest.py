"""The REST API beside the pictures."""
from __future__ import annotations

import threading
import time

from webui_client import PICTURE, WebUI


def test_options_can_be_read_and_set(webui: WebUI) -> None:
    options = webui.get("/sdapi/v1/options")
    if webui.is_standalone:
        assert options["onediff_enabled"] is True
    answer = webui.post("/sdapi/v1/options", {"onediff_low_bit_only": True})
    assert answer.status_code == 200
    if webui.is_standalone:
        assert webui.get("/sdapi/v1/options") == {**options, "onediff_low_bit_only": True}
    assert webui.post("/sdapi/v1/options", {"onediff_low_bit_only": False}).status_code == 200


def test_lists(webui: WebUI) -> None:
    samplers = [sampler["name"] for sampler in webui.get("/sdapi/v1/samplers")]
    assert {"Euler", "Euler a", "DPM++ 2M", "Heun", "DDIM", "UniPC", "LCM"} <= set(samplers)
    names = webui.get("/sdapi/v1/scripts")
    assert "onediff" in names["txt2img"] and "onediff" in names["img2img"]
    if webui.is_standalone:
        return
    described = [script for script in webui.get("/sdapi/v1/script-info") if script["name"] == "onediff"]
    assert {script["is_img2img"] for script in described} == {False, True}
    assert all(script["is_alwayson"] and script["args"][0]["value"] is True for script in described)


def test_progress_and_interrupt(webui: WebUI) -> None:
    """A long generation shows its progress, and stops early with the picture as far as it is."""
    answers = []
    request = {**PICTURE, "steps": 150, "width": 128, "height": 128, "sampler_name": "Euler"}
    worker = threading.Thread(target=lambda: answers.append(webui.post("/sdapi/v1/txt2img", request)))
    worker.start()
    deadline = time.monotonic() + 60
    seen = webui.get("/sdapi/v1/progress")
    while seen["state"]["sampling_step"] < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
        seen = webui.get("/sdapi/v1/progress")
    assert 0 < seen["progress"] < 1
    assert seen["state"]["sampling_steps"] == 150
    assert webui.post("/sdapi/v1/interrupt").status_code == 200
    stopped = time.monotonic()
    worker.join(60)
    assert time.monotonic() - stopped < 20
    assert answers[0].status_code == 200
    assert len(answers[0].json()["images"]) == 1
    assert webui.get("/sdapi/v1/progress")["progress"] == 0
    assert len(webui.txt2img(n_iter=2).images) >= 2, "the interrupt outlived its generation"


def test_requests_at_the_same_time_wait_for_each_other(standalone: WebUI) -> None:
    alone = {seed: standalone.txt2img(seed=seed).files for seed in (1, 2, 3)}
    together: dict[int, list[bytes]] = {}
    workers = [
        threading.Thread(target=lambda seed=seed: together.update({seed: standalone.txt2img(seed=seed).files}))
        for seed in alone
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert together == alone


def test_options_are_kept_in_the_data_folder(tmp_path) -> None:
    from webui_process import HostProcess

    for expected, change in (("auto", "eager"), ("eager", None)):
        host = HostProcess("--port", "0", "--data-dir", str(tmp_path))
        try:
            webui = WebUI(host.url())
            assert webui.get("/sdapi/v1/options")["onediff_backend"] == expected
            if change:
                webui.post("/sdapi/v1/options", {"onediff_backend": change})
        finally:
            host.stop()
    assert "Traceback" not in host.output
