/* The accordion: its controls write into the text box of changed options, which is what a run reads; that box completes
   the names of options; and the page is asked for what has changed elsewhere when somebody comes to the accordion.
   The server's half is lib_onediff/ui/accordion.py and controls.py. */
"use strict";

window.onediffAccordion = (() => {
    // Name of an option to its value without the text box, the words that it takes, and whether presets set it.
    function options(tab) {
        const told = document.querySelector(`#onediff_${tab}_told [data-onediff-options]`);
        return told ? JSON.parse(told.dataset.onediffOptions) : {};
    }

    const partsOf = (text) => text.split(/[;\n]/).map((part) => part.trim()).filter((part) => part);
    const nameOf = (part) => part.split(/[\s=]/)[0];

    function changed(tab, name, text, value) {
        const others = partsOf(text).filter((part) => nameOf(part) !== name);
        const base = (options(tab)[name] || {}).base;
        return [...others, ...(String(value) === base ? [] : [`${name} ${value}`])].join("; ");
    }

    function presetChosen(tab, text) {
        const known = options(tab);
        return partsOf(text).filter((part) => !(known[nameOf(part)] || {}).of_presets).join("; ");
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
        const tab = box && box.id.match(/^onediff_(txt2img|img2img)_changes$/);
        if (tab && event.target.matches("input")) complete(event.target, tab[1]);
    });

    // --- what has changed elsewhere ---

    let visited = null;
    function visit(event) {
        const accordion = event.target.closest && event.target.closest(".onediff-accordion");
        // A click opens it: the pointer may have come before the page could ask.
        if (accordion && (accordion !== visited || event.target.closest(".label-wrap") && event.type === "click")) {
            const ask = accordion.querySelector("[id$=_preset_ask]");
            if (ask) ask.click();
        }
        visited = accordion;
    }

    for (const coming of ["pointerover", "focusin", "click"]) document.addEventListener(coming, visit);

    return {changed, presetChosen};
})();
