"""A WebUI that lacks something that OneDiff needs: OneDiff patches nothing and says what is missing, and the WebUI
works as before."""
from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from contract_hosts import Host, calls_of, on_path
from test_generations import BY_HOST, OURS, RELEASES, close, same

from lib_onediff.core.refusal import Refusal
from lib_onediff.hosts import this_webui
from lib_onediff.hosts.contract import NOT_SUPPORTED, WebUI
from lib_onediff.runtime.runtime import runtime
from lib_onediff.ui import status

LDM = "ldm_patched.ldm.modules."
# (WebUI, Python module, name) of attributes that OneDiff needs, and that the stand-in's generation does not use.
MISSING = [
    ("a1111", "modules.sd_hijack_unet", "th"), ("forge", "backend.memory_management", "module_size"),
    ("neo", "modules_forge.main_thread", "run_and_wait_result"),
    ("reforge", "ldm_patched.modules.model_management", "module_size"), ("classic", "modules.shared", "state"),
]


def check_nothing_is_patched(host: Host, lack: str) -> None:
    """Check that OneDiff patches nothing and refuses to pre-warm, and that its reason is the WebUI's release and
    `lack`."""
    before = host.forwards()
    adapter = host.start()
    reason = f"{RELEASES[host.name][1]} {lack}: {NOT_SUPPORTED}"
    assert type(adapter) is WebUI and adapter.why_not_served() == reason
    assert host.forwards() == before
    current = status.current_status(adapter)
    assert (current["release"], current["hooks"]) == (RELEASES[host.name][1], 0)
    assert (current["route"], current["reason"], current["faults"]) == ("host", reason, [])
    with pytest.raises(Refusal, match="this version of OneDiff does not support that"):
        adapter.warm(64, 64, 2, 77)


@pytest.mark.parametrize(("host", "module", "name"), MISSING, indirect=["host"])
def test_if_the_webui_lacks_an_attribute_the_reason_names_it_and_nothing_is_patched(
    host: Host, module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """module, name: the Python module of the WebUI and its attribute that OneDiff needs. The image equals the one made
    before OneDiff was loaded."""
    expected = host.generate()
    monkeypatch.delattr(host.module(module), name)
    check_nothing_is_patched(host, f"has no {name} in {module}")
    made, calls = calls_of(host.generate)
    assert calls == {} and same(made, expected)


def test_if_the_unet_forward_lacks_a_parameter_the_reason_names_it_and_nothing_is_patched(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The UNet's forward has `timestep` here instead of `timesteps`. The image equals the one made before OneDiff was
    loaded."""
    expected = host.generate()
    kind = getattr(host.module(host.unet_module), host.unet_class)
    original = kind.forward

    def forward(self: Any, x: Any, timestep: Any = None, context: Any = None, y: Any = None, control: Any = None,
                transformer_options: Any = None, **kwargs: Any) -> Any:
        if transformer_options is not None:
            kwargs = {**kwargs, "control": control, "transformer_options": transformer_options}
        return original(self, x, timestep, context, **kwargs)

    monkeypatch.setattr(kind, "forward", forward)
    lack = f"has a {host.unet_class}.forward in {host.unet_module} that does not take timesteps"
    check_nothing_is_patched(host, lack)
    assert same(host.generate(), expected)


def test_if_a_webui_module_cannot_be_imported_the_reason_names_it_and_nothing_is_patched(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module is modules.call_queue. The image equals the one made before OneDiff was loaded."""
    expected = host.generate()
    monkeypatch.setitem(sys.modules, "modules.call_queue", None)
    adapter = host.start()
    assert "has no module modules.call_queue that can be imported (ModuleNotFoundError" in adapter.why_not_served()
    assert adapter.hooks() == 0 and same(host.generate(), expected)


def test_the_webui_serves_while_the_checkpoint_lacks_an_attribute_that_onediff_needs(host: Host) -> None:
    """Whether the attribute is there is only known once a checkpoint is loaded. OneDiff serves again when a complete
    checkpoint is loaded."""
    expected = host.generate()
    path = "first_stage_model" if host.name == "a1111" else "forge_objects_after_applying_lora"
    whole = host.checkpoint
    adapter = host.start()
    host.checkpoint = SimpleNamespace(**{name: value for name, value in vars(whole).items() if name != path})
    host.announce()
    reason = f"{adapter.release} has loaded a checkpoint without {path}: {NOT_SUPPORTED}"
    assert adapter.why_not_served() == reason and runtime.guard.faults == []
    host.checkpoint = whole
    made, calls = calls_of(host.generate)
    assert calls == BY_HOST and runtime.status()["reason"] == reason and (made.latent == expected.latent).all()
    host.announce()
    made, calls = calls_of(host.generate)
    assert adapter.why_not_served() is None and calls == OURS and close(made, expected)


@pytest.mark.parametrize("host", ["classic"], indirect=True)
def test_without_a_checkpoint_the_status_works_and_the_next_checkpoint_is_served(host: Host) -> None:
    """Forge Classic deletes the old checkpoint before it loads the next one, which may fail. Meanwhile, the status has
    no model and no fault."""
    expected = host.generate()
    adapter = host.start()
    data = host.module("modules.sd_models").model_data
    del data.sd_model
    assert (adapter.notes(), adapter.why_not_served(), adapter.model_name()) == ([], None, None)
    current = status.current_status(adapter)
    assert (current["hooks"], current["faults"]) == (1, [])
    host.switch(False)
    host.switch(True)
    data.sd_model = host.checkpoint
    made, calls = calls_of(host.generate)
    assert calls == OURS and close(made, expected) and runtime.guard.faults == []


@pytest.mark.parametrize("folders", [("webui",), ()], ids=["unknown modules", "no modules"])
def test_in_an_unsupported_webui_every_method_of_the_adapter_does_nothing(folders: tuple[str, ...]) -> None:
    """The adapter is then an instance of the base class WebUI. folders: the stand-in has the Python modules that all
    WebUIs share, or none."""
    with on_path(*folders):
        adapter = this_webui()
        assert type(adapter) is WebUI
        adapter.serve()
        adapter.model_loaded(object())
        adapter.before_sampling(object())
        adapter.after_run(object())
        assert adapter.hooks() == 0 and adapter.exclusively(lambda: adapter.model_name()) is None
        assert adapter.why_not_served() == "OneDiff does not support this WebUI, and changes nothing in it"
        adapter.stop()
    assert runtime.guard.faults == []
