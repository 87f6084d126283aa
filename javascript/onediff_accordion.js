/* The accordion. Its controls write into the text box of extra options, which alone counts for the next image. When the
   accordion comes into view, this script asks the server for changes that were made elsewhere. The server's side is
   lib_onediff/ui/accordion.py. */
"use strict";

window.onediffAccordion = (() => {
    // The server's last answer for a tab. base: the options' values without the text box. of_presets: names of the options
    // that presets set. labels: names of options by their labels. said_of: the preset and the text of this answer.
    function known(tab) {
        const told = document.querySelector(`#onediff_${tab}_told [data-onediff-run]`);
        return told ? JSON.parse(told.dataset.onediffRun) : {base: {}, of_presets: [], labels: {}, said_of: []};
    }

    const partsOf = (text) => text.split(/[;\n]/).map((part) => part.trim()).filter((part) => part);

    // The name of the option that a part of the text sets: "DeepCache interval 3" sets deepcache_interval.
    function nameOf(part, labels) {
        const words = part.toLowerCase().split(/[\s=:]+/).join(" ");
        const label = Object.keys(labels).find((known) => `${words} `.startsWith(`${known} `));
        return label ? labels[label] : part.split(/[\s=:]/)[0];
    }

    // The text with this option at a new value; without the option if the value is the same as without the text.
    function changed(tab, name, text, value) {
        const {base: {[name]: base}, labels} = known(tab);
        const others = partsOf(text).filter((part) => nameOf(part, labels) !== name);
        // A slider has 1 where the server has 1.0.
        const same = String(value) === base || Number(value) === Number(base);
        return [...others, ...(same ? [] : [`${name} ${value}`])].join("; ");
    }

    // The text without the options that a preset sets: a preset that is chosen sets all of them.
    function presetChosen(tab, text) {
        const {of_presets: names, labels} = known(tab);
        return partsOf(text).filter((part) => !["speed", ...names].includes(nameOf(part, labels))).join("; ");
    }

    // --- changes that were made elsewhere: in the settings, by another model, on another page ---

    function ask(tab) {
        const button = document.getElementById(`onediff_${tab}_ask`);
        if (button) button.click();
    }

    // The answers of a busy server may arrive out of order, so the last one may be for earlier values. Then the server is
    // asked once more, but only once for the same values: a list may show another word than the one it sends.
    const askedFor = {};
    function askIfOld(tab) {
        const [preset, text] = known(tab).said_of;
        const list = document.querySelector(`#onediff_${tab}_preset input`);
        const field = document.querySelector(`#onediff_${tab}_changes :is(textarea, input)`);
        if (text === undefined || [list, field].includes(document.activeElement)) return;
        const there = [list ? list.value : preset, field ? field.value : text];
        if (String(there) === String([preset, text])) delete askedFor[tab];
        else if (askedFor[tab] !== String(there)) {
            askedFor[tab] = String(there);
            setTimeout(() => ask(tab), 1000);
        }
    }

    const inView = {};
    function look() {
        for (const accordion of document.querySelectorAll(".onediff-accordion")) {
            askIfOld(accordion.id.replace("onediff_", ""));
            const seen = !document.hidden && accordion.offsetParent !== null;
            // Settings that were just applied may take a moment to count.
            if (seen && !inView[accordion.id]) for (const after of [0, 2000, 6000]) {
                setTimeout(() => ask(accordion.id.replace("onediff_", "")), after);
            }
            inView[accordion.id] = seen;
        }
    }

    document.addEventListener("click", (event) => {
        const title = event.target.closest && event.target.closest(".onediff-accordion .label-wrap");
        if (title) ask(title.closest(".onediff-accordion").id.replace("onediff_", ""));
        // After applying settings, the user may be back at the accordion before the next look.
        if (event.target.closest && event.target.closest("#settings_submit")) forget();
    });
    const forget = () => { for (const id of Object.keys(inView)) delete inView[id]; };
    addEventListener("focus", forget);

    // --- for the keyboard and for screen readers ---

    const TITLES = ":is(.onediff-accordion, #tab_onediff) .label-wrap";

    // gradio 3 makes an accordion's title a div, which the keyboard cannot reach.
    document.addEventListener("keydown", (event) => {
        if (["Enter", " "].includes(event.key) && event.target.tagName === "DIV" && event.target.matches(TITLES)) {
            event.preventDefault();
            event.target.click();
        }
    });

    // Names for screen readers: gradio 3 has none for a slider's number field. Called again and again, because parts of the
    // page are made later.
    function name() {
        for (const title of document.querySelectorAll(TITLES)) {
            if (title.tagName === "DIV") {
                title.tabIndex = 0;
                title.role = "button";
            }
            title.ariaExpanded = title.classList.contains("open");
        }
        const ours = ".onediff-accordion, #tab_onediff, #settings_onediff";
        for (const field of document.querySelectorAll(`:is(${ours}) input[type=number]`)) {
            if (field.ariaLabel || field.labels.length) continue;
            const label = field.parentElement.querySelector("label");
            if (label) field.ariaLabel = label.innerText.trim();
        }
    }

    setInterval(() => { look(); name(); }, 500);

    return {changed, presetChosen, ask};
})();
