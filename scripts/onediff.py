"""OneDiff's script for the WebUI: connects the WebUI's callbacks to the extension."""
from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

from modules import script_callbacks, scripts, shared

from lib_onediff.core.jobs import JobQueue
from lib_onediff.core.logs import log, show_on_console
from lib_onediff.core.settings import Settings
from lib_onediff.core.sizes import parse_prewarm
from lib_onediff.hosts import this_webui
from lib_onediff.hosts.images import HostImages
from lib_onediff.prewarm.worker import WarmUp
from lib_onediff.runtime.runtime import runtime
from lib_onediff.store.history import chosen_folder
from lib_onediff.ui import accordion, infotext, onediff_tab, run_settings, settings_tab, status, xyz
from lib_onediff.ui.facts import checkpoint_name

CACHE_FOLDER = Path("cache", "onediff")
# How long stop() waits at most until the job in progress has stopped.
SECONDS_FOR_THE_LAST_CALL = 5

show_on_console()
# Every function that the WebUI calls runs in the guard, which logs our faults and lets the WebUI go on.
guard = runtime.guard
guard.forget()
webui = this_webui()
images_of_host = guard.hook("reading the WebUI's images", otherwise=())(HostImages(runtime.generations).jobs)
jobs = JobQueue(images_of_host)
warmup = WarmUp(webui, runtime, jobs)


@guard.hook("following the settings")
def follow_settings() -> None:
    """Called after every change of the settings: set the hooks, or remove them and end the jobs if the setting
    `enabled` is off."""
    if runtime.settings.enabled:
        webui.serve()
    else:
        # webui.stop first, so that the hooks are removed even if the other fails.
        for step in (webui.stop, jobs.stop):
            guard.attempt("switching OneDiff off", step)


@guard.hook("looking at a loaded checkpoint")
def model_loaded(sd_model: Any) -> None:
    """Called when the WebUI has loaded a checkpoint: serve it if OneDiff is on. Even if that fails, the process counts
    as ready for images (WarmUp.why_not_ready): the WebUI makes them alone."""
    try:
        if runtime.settings.enabled:
            prepare(sd_model)
    finally:
        warmup.checkpoint_loaded()


def prepare(sd_model: Any) -> None:
    """Serve a checkpoint, and queue the sizes to pre-warm for it: those of the setting `prewarm`, and the most used
    ones."""
    webui.model_loaded(sd_model)
    wanted = parse_prewarm(runtime.settings.prewarm)
    warmup.add(wanted.sizes, "settings")
    for size, tokens in runtime.history.most_used(webui.model_name(sd_model), wanted.most_used):
        warmup.add([size], "most used", tokens=tokens)


@guard.hook("the beginning of a step")
def before_step(params: Any) -> None:
    """Called before each step of a sampling, for the adapter; does nothing if the setting `enabled` is off. params: the
    WebUI's CFGDenoiserParams."""
    if runtime.settings.enabled:
        webui.before_step(params)


def stop() -> None:
    """Called when the WebUI unloads the script: remove the hooks and the X/Y/Z plot's axes, and end the jobs."""
    last = (lambda: xyz.remove_axes(scripts.scripts_data), lambda: jobs.stop(seconds=SECONDS_FOR_THE_LAST_CALL))
    for step in (webui.stop, *last):
        guard.attempt("unloading the script", step)


def current_status() -> dict[str, Any]:
    """The status of OneDiff and of the last image, as plain values for the page and the API."""
    return status.current_status(webui)


@guard.hook("the status line", otherwise=status.UNREADABLE)
def status_lines() -> tuple[str, str]:
    """The status in the accordion's title and the one inside it, as markup; status.UNREADABLE if our code fails."""
    now = current_status()
    return status.summary_html(now), status.status_html(now)


def is_cut_short() -> bool:
    """Whether the user has interrupted or skipped the image in progress."""
    return bool(shared.state.interrupted or shared.state.skipped)


def standing_settings() -> Settings:
    """The settings of the settings tab; while a generation overrides options (override_settings), with its values."""
    return settings_tab.settings_from(shared.opts)


def settings_of_run(*arguments: Any) -> Settings:
    """The settings of a run, given the values of our script arguments (see run_settings.settings_of_run). Raises
    ValueError with a sentence for users."""
    return run_settings.settings_of_run(arguments, standing_settings())


paste_functions = infotext.paste_functions(lambda: runtime.settings, settings_tab.tell)


class OneDiffScript(scripts.Script):
    """The accordion in the txt2img and img2img tabs, and the WebUI's callbacks during a generation. The WebUI makes an
    object for each tab and calls the methods, whose names and arguments are those of its scripts.Script."""

    # The accordion's components that are updated after each generation.
    built: tuple[Any, ...] = ()

    def title(self) -> str:
        """The script's name, for the WebUI."""
        return "OneDiff"

    def show(self, is_img2img: bool) -> Any:
        """Takes part in every generation, of both tabs."""
        return scripts.AlwaysVisible

    def tab(self) -> str:
        """The tab to which this object belongs."""
        return "img2img" if self.is_img2img else "txt2img"

    @guard.hook("building the accordion", otherwise=[])
    def ui(self, is_img2img: bool) -> list[Any]:
        """Build the accordion. Returns the components whose values are the script arguments; [] if our code fails."""
        arguments, self.built = accordion.build_accordion(self.tab(), status_lines, settings_of_run)
        self.infotext_fields = list(zip(arguments, paste_functions, strict=True))
        self.paste_field_names = list(paste_functions)
        return arguments

    @guard.hook("connecting the accordion")
    def after_component(self, component: Any, **kwargs: Any) -> None:
        """Called for every component that the WebUI creates: connect the accordion with the one that it needs."""
        accordion.connect(component, self.tab(), self.built, status_lines)

    @guard.hook("the settings of this generation", in_generation=True)
    def process(self, p: Any, *arguments: Any) -> None:
        """Begin the generation p: its settings are those of the settings tab, changed by the accordion or API
        (arguments), then by the X/Y/Z plot's cell. With a wrong value, OneDiff is off for this generation, and a note
        below the images says why. If the setting `enabled` is off, begins nothing; a note says so if arguments set
        options (run_settings.refusal_while_off)."""
        guard.resume()
        if not runtime.settings.enabled:
            if refusal := run_settings.refusal_while_off(arguments):
                run_settings.tell(p, refusal)
            return
        why_off = ""
        try:
            settings = xyz.settings_of_cell(p, settings_of_run(*arguments))
        except ValueError as problem:
            settings = Settings(enabled=False)
            why_off = f"{problem} OneDiff is off for this run."
            run_settings.tell(p, why_off)
        run_settings.describe(p, settings, webui.why_not_served() is None)
        runtime.generations.begin(p, settings, why_off).resolution = run_settings.resolution_of(p)

    @guard.hook("the beginning of a sampling", in_generation=True)
    def process_before_every_sampling(self, p: Any, *args: Any, **kwargs: Any) -> None:
        """Announce a sampling to the adapter, before it begins: the first pass, or hires fix at another size. Does
        nothing if the setting `enabled` is off."""
        if runtime.settings.enabled:
            generation = runtime.generations.innermost
            if generation is not None:
                generation.resolution = run_settings.resolution_of(p)
            webui.before_sampling(p)

    @guard.hook("the infotext")
    def postprocess_batch(self, p: Any, *args: Any, **kwargs: Any) -> None:
        """Called when the images of a batch are done, before their infotexts are written: write the options that had an
        effect into the infotext."""
        generation = runtime.generations.innermost
        if generation is not None:
            generation.note_batch(p, is_cut_short())
            is_served = webui.why_not_served() is None
            run_settings.describe(p, generation.settings, is_served, generation.log.record())

    @guard.hook("the end of a generation")
    def postprocess(self, p: Any, processed: Any, *args: Any) -> None:
        """End the generation p: its numbers are the last image's from now on, and the history gets the uses and
        durations."""
        run_settings.end_image(p, checkpoint_name(), not is_cut_short())
        if runtime.settings.enabled:
            webui.after_run(p)
            runtime.keep_history()


@guard.hook("adding axes to the X/Y/Z plot")
def add_axes() -> None:
    """Add our options to the X/Y/Z plot, just before the WebUI builds the page."""
    xyz.add_axes(scripts.scripts_data, lambda: runtime.settings)


@guard.hook("adding options to the settings tab")
def add_options() -> None:
    """Add our options to the settings tab, when the WebUI collects those of all extensions."""
    settings_tab.add_options(shared.opts, shared.OptionInfo, follow_settings)


@guard.hook("building the OneDiff tab", otherwise=[])
def tabs() -> list[tuple[Any, str, str]]:
    """The OneDiff tab, as (component, title, element id); [] if it cannot be built."""
    tab = onediff_tab.build_onediff_tab(
        runtime, warmup, jobs, webui.exclusively, OneDiffScript, standing_settings, settings_of_run, webui.release
    )
    return [(tab, onediff_tab.TITLE, onediff_tab.ELEM_ID)]


@guard.hook("protecting the page and adding routes to the API")
def start(page: Any, app: Any) -> None:
    """Called once the page (gradio's Blocks; None with --nowebui) and the server (app, FastAPI) are ready: protect our
    handlers against pages of other sites, and add the API's routes. Not earlier, so that the page does not wait for
    their imports."""
    from lib_onediff.api import auth, routes

    auth.refuse_foreign_pages(page, shared.cmd_opts)
    routes.add_routes(app, shared.cmd_opts, runtime, warmup, jobs, webui.exclusively, current_status)


@guard.hook("opening the cache")
def open_cache() -> None:
    """Open the history in the folder of the environment variable ONEDIFF_CACHE, by default CACHE_FOLDER in the WebUI's
    data folder. A problem with the folder is logged for the user."""
    runtime.open_cache(chosen_folder() or webui.data_folder() / CACHE_FOLDER)
    settings_tab.tell_of_trouble()


# All of this runs now, because a model may be loaded before the page is built, and with --nowebui there is no page.
guard.attempt("reading the settings", lambda: runtime.configure(settings_tab.stored_settings(shared.opts)))
guard.attempt("saying what serves", lambda: log.info(runtime.devices.start_line(runtime.settings)))
open_cache()
guard.attempt("looking for a checkpoint", warmup.find_loaded_checkpoint)
follow_settings()
# Each callback is registered from a thread of its own. The WebUI inspects the stack of the caller, and for every frame
# of a script (which is not a module) searches all modules of the process, which takes 0.05 to 0.1 s. A new thread's
# stack has no frame of a script.
for takes, ours in (
    (script_callbacks.on_model_loaded, model_loaded), (script_callbacks.on_script_unloaded, stop),
    (script_callbacks.on_before_ui, add_axes), (script_callbacks.on_ui_settings, add_options),
    (script_callbacks.on_ui_tabs, tabs), (script_callbacks.on_app_started, start),
    (script_callbacks.on_cfg_denoiser, before_step),
):
    registering = threading.Thread(target=guard.attempt, args=("registering with the WebUI", partial(takes, ours)))
    registering.start()
    registering.join()
