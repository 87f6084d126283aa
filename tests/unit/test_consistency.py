"""The consistency report (what may make one seed give different images on two machines): its content, reading it back,
and comparing two."""
from __future__ import annotations

import sys
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from lib_onediff import __version__
from lib_onediff.core.settings import Settings
from lib_onediff.runtime.cache import source_digest
from lib_onediff.ui.consistency import differences, parse, report
from lib_onediff.ui.facts import as_fact, host_facts, machine_facts, onediff_facts

STATUS = {"backend": "eager", "route": "plain", "model": "SD1"}


def test_a_report_of_this_machine_is_parsed_back_unchanged() -> None:
    """Some values contain the report's own punctuation. A report that is quoted in a message is parsed, too."""
    odd = {"text": "a: b\n[c] > \\/", "empty": "", "no": None, "small": 1e-9, "off": False}
    facts = {
        **machine_facts(), **onediff_facts(Settings(), STATUS, {"attention": {"512": "flash"}}),
        "Odd": {name: as_fact(value) for name, value in odd.items()},
    }
    assert parse(report(facts)) == facts
    software = facts["Software"]
    assert software["torch"] == torch.__version__ and software["OneDiff"] == f"{__version__} {source_digest()}"
    assert facts["OneDiff"]["Backend in use"] == "eager"
    assert set(facts["OneDiff settings"]) == {option.name for option in fields(Settings)}
    quoted = "\n".join(f"> {line}" for line in report(facts).splitlines())
    assert parse(f"Hello,\nhere it is:\n{quoted}\n") == facts


def test_the_report_has_the_switches_of_torch_and_only_the_listed_environment_variables(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """Switches are those that affect results, such as cuDNN benchmark. A variable that is not listed may hold a
    secret."""
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.setenv("HOME_OF_A_SECRET", "hunter2")
    matmul = torch.backends.cuda.matmul
    cudnn = torch.backends.cudnn
    before = matmul.allow_fp16_reduced_precision_reduction, cudnn.benchmark
    try:
        for value, word in ((True, "on"), (False, "off")):
            matmul.allow_fp16_reduced_precision_reduction = cudnn.benchmark = value
            facts = machine_facts()
            switches = facts["PyTorch"]
            assert (switches["fp16 reduced precision reduction"], switches["cuDNN benchmark"]) == (word, word)
    finally:
        matmul.allow_fp16_reduced_precision_reduction, cudnn.benchmark = before
    assert facts["Environment"]["NVIDIA_TF32_OVERRIDE"] == "0" and "hunter2" not in report(facts)


def test_each_fact_that_differs_between_two_reports_is_one_line() -> None:
    mine = {"Model": {"Checkpoint": "a"}, "Machine": {"GPU": "A", "System": "Linux"}}
    theirs = {"Machine": {"GPU": "B", "System": "Linux"}, "Model": {"Checkpoint": "b"}, "Other": {"Only": "there"}}
    assert differences(mine, theirs) == [
        "Model, Checkpoint: here a, there b", "Machine, GPU: here A, there B",
        "Other, Only: here not in the report, there there",
    ]
    assert differences(mine, mine) == []


@pytest.mark.parametrize("text", ["hello", "[Machine]\nGPU: A", "OneDiff consistency report, format 2\n[Machine]"])
def test_a_text_that_is_not_a_report_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="not a consistency report of this version"):
        parse(text)


def test_listed_flags_and_options_of_a_webui_are_reported_without_folders_and_passwords(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags and options are read by name from the WebUI's package `modules`, here a stand-in; those that it lacks are
    left out. Of a file's path, only the file name is reported."""
    shared = SimpleNamespace(
        cmd_opts=SimpleNamespace(no_half=True, precision="full", api_auth="me:secret", ckpt_dir="/home/somebody"),
        opts=SimpleNamespace(upcast_attn=True, sd_vae="a/b.safetensors", outdir_samples="/home/somebody", s_churn=0.5),
    )
    loaded = SimpleNamespace(sd_checkpoint_info=SimpleNamespace(name_for_extra="sub/model"), sd_model_hash="abc")
    modules = {
        "shared": shared, "sd_models": SimpleNamespace(model_data=SimpleNamespace(sd_model=loaded)),
        "sd_hijack": SimpleNamespace(model_hijack=SimpleNamespace(optimization_method="sdp")),
        "devices": SimpleNamespace(dtype=torch.float32, dtype_vae=torch.bfloat16),
    }
    monkeypatch.setitem(sys.modules, "modules", SimpleNamespace(**modules))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"modules.{name}", module)
    facts = host_facts("A1111 v1.10.1")
    assert facts["WebUI"] == {
        "Release": "A1111 v1.10.1", "Attention": "sdp", "Type": "float32", "Type of the VAE": "bfloat16",
    }
    assert facts["WebUI flags"] == {"precision": "full", "no_half": "on"}
    assert facts["WebUI options"] == {"upcast_attn": "on", "sd_vae": "b.safetensors", "s_churn": "0.5"}
    assert facts["Model"] == {"Checkpoint": "model", "Hash": "abc"}
    assert "secret" not in report(facts) and "somebody" not in report(facts)
