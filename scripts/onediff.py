"""OneDiff in the WebUI: hooks the host's moments to the extension, and nothing else."""
from __future__ import annotations

import logging
from typing import Any

from modules import script_callbacks, scripts, sd_models, shared

from lib_onediff.hosts import diffusers as diffusers_host
from lib_onediff.settings import Settings
from lib_onediff.ui import accordion, run_settings, settings_tab, status, status_route

log = logging.getLogger("onediff")


def loaded_model() -> Any:
    # shared.sd_model would load one.
    return sd_models.model_data.sd_model


def diffusers_unet(sd_model: Any) -> Any:
    """The UNet of a WebUI that runs a diffusers pipeline; None for every other."""
    unet = getattr(sd_model, "unet", None)
    return unet if type(unet).__name__ == "UNet2DConditionModel" else None


def why_not_served() -> str | None:
    """One line about the loaded model, or None when OneDiff serves it."""
    model = loaded_model()
    if model is None or diffusers_unet(model) is not None:
        return None
    return "this WebUI is not served yet: its own UNet makes the pictures"


def serve(sd_model: Any) -> None:
    unet = diffusers_unet(sd_model)
    if unet is not None:
        diffusers_host.attach(unet)


def stop_serving() -> None:
    unet = diffusers_unet(loaded_model())
    if unet is not None:
        diffusers_host.detach(unet)


def current_status() -> dict[str, Any]:
    return status.current_status(why_not_served)


def status_line() -> str:
    return status.status_html(current_status())


class OneDiffScript(scripts.Script):
    def title(self) -> str:
        return "OneDiff"

    def show(self, is_img2img: bool) -> Any:
        return scripts.AlwaysVisible

    def ui(self, is_img2img: bool) -> list[Any]:
        return accordion.build_accordion("img2img" if is_img2img else "txt2img", status_line)

    def after_component(self, component: Any, **kwargs: Any) -> None:
        accordion.refresh_after_generation(component, "img2img" if self.is_img2img else "txt2img", status_line)

    def process(self, p: Any, argument: Any = True, *args: Any) -> None:
        serve(loaded_model())
        try:
            settings = run_settings.settings_of_run(argument, settings_tab.settings_from(shared.opts))
        except ValueError as problem:
            log.warning("%s OneDiff is off for this run.", problem)
            p.comment(f"{problem} OneDiff is off for this run.")
            settings = Settings(enabled=False)
        run_settings.use_for_sampling(p, settings)

    def postprocess(self, p: Any, processed: Any, *args: Any) -> None:
        run_settings.restore_sampling(p)


script_callbacks.on_model_loaded(serve)
script_callbacks.on_script_unloaded(stop_serving)
script_callbacks.on_ui_settings(lambda: settings_tab.add_options(shared.opts, shared.OptionInfo))
script_callbacks.on_app_started(
    lambda demo, app: status_route.add_status_route(app, getattr(shared.cmd_opts, "api_auth", None), current_status)
)
