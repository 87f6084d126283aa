/* The accordion: its controls write into the text box of changed options, which is what
   a run reads; that box completes the names of options; and the page is asked for what has changed elsewhere when
   somebody comes to the accordion. The server's half is lib_onediff/ui/accordion.py and controls.py. */
"use strict";

window.onediffAccordion = (() => {
    // run: the preset and the text that stand under the controls. options: name of an option to its value without the
    // text box, the words that it takes, and whether presets set it.
    const answer = (tab) => document.querySelector(`#onediff_${tab}_told [data-onediff-run]`);
    function known(tab) {
        const told = answer(tab);
        return told ? JSON.parse(told.dataset.onediffRun) : {};
    }

    const options = (tab) => known(tab).options || {};

    const TABS = ["txt2img", "img2img"];
    const partsOf = (text) => text.split(/[;\n]/).map((part) => part.trim()).filter((part) => part);
    const nameOf = (part) => part.split(/[\s=]/)[0];

    function changed(tab, name, text, value) {
        const others = partsOf(text).filter((part) => nameOf(part) !== name);
        const base = (options(tab)[name] || {}).base;
        // A slider's 1 is the server's 1.0.
        const same = String(value) === base || Number(value) === Number(base);
        return [...others, ...(same ? [] : [`${name} ${value}`])].join("; ");
    }

    function presetChosen(tab, text) {
        const named = options(tab);
        return partsOf(text).filter((part) => !(named[nameOf(part)] || {}).of_presets).join("; ");
    }

    // --- completing names and values ---

    function complete(field, tab) {
        const list = document.getElementById(`onediff_${tab}_names`) || document.createElement("datalist");
        if (!list.id) {
            list.id = `onediff_${tab}_names`;
            document.body.append(list);
        }
        field.setAttribute("list", list.id);
        const before = field.value.slice(0, field.value.lastIndexOf(";") + 1) + (field.value.includes(";") ? " " : "");
        const words = ([name, {words}]) => words.length ? words.map((word) => `${name} ${word}`) : [`${name} `];
        list.replaceChildren(...Object.entries(options(tab)).flatMap(words).map((words) => {
            const option = document.createElement("option");
            option.value = before + words;
            option.label = words.trim();
            return option;
        }));
    }

    for (const coming of ["focusin", "input"]) document.addEventListener(coming, (event) => {
        const box = event.target.closest && event.target.closest("[id^=onediff_][id$=_changes]");
        const tab = box && TABS.find((name) => box.id === `onediff_${name}_changes`);
        if (tab && event.target.matches("input")) complete(event.target, tab);
    });

    // --- what is set here ---

    // In the title: it counts more than the settings, now and after they have changed.
    function setHere(preset, text) {
        const words = [...(preset ? [preset] : []), ...partsOf(text)].join("; ");
        const place = document.createElement("span");
        if (words) {
            place.className = "onediff-set-here";
            place.title = place.textContent = `Set here: ${words}`;
        }
        return words ? place.outerHTML : "";
    }

    // --- what has changed elsewhere ---

    // Settings, models and other pages change what a run will be. The page asks when the accordion comes into view, when
    // somebody comes to it, and for a while after the click that changes settings: nobody tells when that has worked.
    const MAY_TAKE = 10000;
    const CHANGE_SETTINGS = "#settings_submit, #quicksettings, #onediff_preset_use";
    let visited = null, askUntil = 0;
    const inView = {};
    function ask(tab) {
        const button = document.getElementById(`onediff_${tab}_ask`);
        if (button) button.click();
    }

    function visit(event) {
        const at = (selector) => event.target.closest && event.target.closest(selector);
        const accordion = at(".onediff-accordion");
        // A click opens it: the pointer may have come before the page could ask.
        if (accordion && (accordion !== visited || at(".label-wrap") && event.type === "click")) {
            ask(accordion.id.replace("onediff_", ""));
        }
        visited = accordion;
        if (["click", "change"].includes(event.type)) {
            if (at(CHANGE_SETTINGS)) askUntil = Date.now() + MAY_TAKE;
            // Another tab of the page is there a moment later.
            setTimeout(look);
        }
    }

    function look(again) {
        for (const accordion of document.querySelectorAll(".onediff-accordion")) {
            const seen = !document.hidden && accordion.offsetParent !== null;
            if (seen && (!inView[accordion.id] || again && Date.now() < askUntil)) {
                ask(accordion.id.replace("onediff_", ""));
            }
            inView[accordion.id] = seen;
        }
    }

    for (const coming of ["pointerover", "focusin", "click", "change"]) document.addEventListener(coming, visit);
    document.addEventListener("visibilitychange", () => look());
    addEventListener("focus", () => { Object.keys(inView).forEach((id) => delete inView[id]); look(); });
    setInterval(() => look(true), 1000);

    // --- answers that overtook one another ---

    // By place: the answer that did not fit, what the fields were, and how often and when that was asked for. gradio
    // drops a click while it waits for an answer to an earlier one, so one alone may not be heard.
    const MOST_TIMES = 3, BETWEEN_TIMES = 5000;
    const asked = {};
    const field = (id) => document.querySelector(`#${id} input`);
    function askAgain(tab) {
        const told = answer(tab), run = known(tab).run;
        const fields = [field(`onediff_${tab}_preset`) || field(`onediff_${tab}`), field(`onediff_${tab}_changes`)];
        // Nobody is corrected while typing.
        if (!run || !fields.every(Boolean) || fields[1] === document.activeElement) return;
        const now = JSON.stringify(fields.map((each) => each.value)), last = asked[tab] || {};
        const times = last.told === told && last.now === now ? last.times : 0;
        if (JSON.stringify(run) === now || times >= MOST_TIMES || times && Date.now() - last.at < BETWEEN_TIMES) return;
        asked[tab] = {told, now, times: times + 1, at: Date.now()};
        ask(tab);
    }

    setInterval(() => TABS.forEach(askAgain), 1000);

    // --- for the keyboard and for screen readers ---

    // gradio 3 makes an accordion's title of what no key reaches.
    document.addEventListener("keydown", (event) => {
        if (["Enter", " "].includes(event.key) && event.target.matches(".onediff-accordion div.label-wrap")) {
            event.preventDefault();
            event.target.click();
        }
    });

    // Nor does it name a slider's number field; parts of the page come later.
    setInterval(() => {
        for (const title of document.querySelectorAll(".onediff-accordion div.label-wrap")) {
            title.tabIndex = 0;
            title.role = "button";
            title.ariaExpanded = title.classList.contains("open");
        }
        const ours = ".onediff-accordion, #tab_onediff, #settings_onediff";
        for (const field of document.querySelectorAll(`:is(${ours}) input[type=number]`)) {
            if (field.ariaLabel || field.labels.length) continue;
            const label = field.parentElement.querySelector("label");
            if (label) field.ariaLabel = label.innerText.trim();
        }
    }, 1000);

    return {changed, presetChosen, setHere, ask};
})();
