/* OneDiff's section of the settings page. A WebUI shows its options as one list; here they get headings, a mark and a
   button where they are not at their default, and a reason where a value is wrong or does nothing; rows that would do
   nothing are hidden. The options and the words come from lib_onediff/ui/settings_form.py, which is also asked for the
   reasons.

   The page shows what it was given when it was opened: when OneDiff's Presets page has changed options, show() brings
   them up to date, as applying the settings would bring the old values back. */
"use strict";

window.onediffSettings = (() => {
    const BETWEEN_LOOKS = 400;
    const rowOf = (key) => document.getElementById(`setting_${key}`);
    let told = null, before = "", number = 0, answered = "";

    // --- values ---

    function show(key, value) {
        const row = rowOf(key);
        if (!row) return;
        const radios = [...row.querySelectorAll("input[type=radio]")];
        const box = row.querySelector("input[type=checkbox]");
        const field = row.querySelector("textarea, input[type=number], input[type=text]");
        if (radios.length) {
            const chosen = radios.find((radio) => radio.value === value);
            if (chosen && !chosen.checked) chosen.click();
        } else if (box) {
            if (box.checked !== value) box.click();
        } else if (field) {
            field.value = value;
            field.dispatchEvent(new Event("input", {bubbles: true}));
        }
    }

    function valueOf(key) {
        const row = rowOf(key);
        if (!row) return undefined;
        const radios = [...row.querySelectorAll("input[type=radio]")];
        if (radios.length) return (radios.find((radio) => radio.checked) || {}).value;
        const box = row.querySelector("input[type=checkbox]");
        if (box) return box.checked;
        const field = row.querySelector("textarea, input[type=number], input[type=text]");
        return field ? field.value : undefined;
    }

    const isNumber = (key) => typeof told.options[key].default === "number";
    const isAt = (key, value, wanted) => isNumber(key) ? Number(value) === wanted && value !== "" : value === wanted;
    const values = () => Object.fromEntries(Object.keys(told.options).map((key) => [key, valueOf(key)])
        .filter(([, value]) => value !== undefined));

    // --- what stands beside the fields ---

    function element(name, className, text) {
        const made = document.createElement(name);
        made.className = className;
        made.textContent = text;
        return made;
    }

    // Below the field itself; what stands there already is not drawn anew.
    function say(row, kind, text) {
        let place = row.querySelector(`:scope > .onediff-${kind}`);
        if (!text) {
            if (place) place.remove();
            return null;
        }
        if (!place) {
            place = element("p", `onediff-result onediff-${kind}`, "");
            if (kind === "wrong") place.setAttribute("role", "alert");
            row.append(place);
        }
        if (place.dataset.text !== text) {
            place.dataset.text = text;
            place.textContent = text;
            return place;
        }
        return null;
    }

    function aButton(text, name, click) {
        const button = element("button", "onediff-small", text);
        button.type = "button";
        button.setAttribute("aria-label", name);
        button.addEventListener("click", click);
        return button;
    }

    function headings(section) {
        const groups = new Set();
        for (const [key, option] of Object.entries(told.options)) {
            const row = rowOf(key);
            if (!row || groups.has(option.group)) continue;
            groups.add(option.group);
            if (!section.querySelector(`[data-onediff-group="${option.group}"]`)) {
                const heading = element("h4", "onediff-group", option.group);
                heading.dataset.onediffGroup = option.group;
                row.before(heading);
            }
        }
        if (section.querySelector(".onediff-settings-head")) return;
        const head = element("div", "onediff-settings-head", "");
        head.append(element("span", "onediff-reason", ""), aButton(told.texts.reset_all, told.texts.reset_all, () => {
            for (const [key, option] of Object.entries(told.options)) show(key, option.default);
            look();
        }));
        section.querySelector(".onediff-group").before(head);
    }

    function changedKeys(now) {
        return Object.keys(now).filter((key) => !isAt(key, now[key], told.options[key].default));
    }

    function mark(section, now) {
        const changed = changedKeys(now);
        for (const [key, option] of Object.entries(told.options)) {
            const row = rowOf(key);
            if (!row) continue;
            const isChanged = changed.includes(key);
            const rests = Object.entries(option.no_effect_when).some(([other, at]) =>
                other in now && at.some((value) => isAt(other, now[other], value)));
            // What was changed stays in sight: it counts again as soon as the other option does.
            row.toggleAttribute("data-onediff-rests", rests && !isChanged);
            row.toggleAttribute("data-onediff-changed", isChanged);
            const text = told.texts.default.replace("{}", option.shown === "" ? told.texts.none : option.shown);
            const place = say(row, "changed", isChanged ? text : "");
            if (place) {
                const label = row.querySelector("span[data-testid=block-info], label > span, span");
                const name = `${told.texts.reset}: ${label ? label.firstChild.textContent.trim() : key}`;
                place.append(" ", aButton(told.texts.reset, name, () => { show(key, option.default); look(); }));
            }
        }
        const head = section.querySelector(".onediff-settings-head");
        const one = changed.length === 1 ? told.texts.changed_one : told.texts.changed;
        const text = changed.length ? one.replace("{}", changed.length) : told.texts.unchanged;
        if (head.firstChild.textContent !== text) head.firstChild.textContent = text;
        head.lastChild.disabled = !changed.length;
    }

    function reasons() {
        const found = document.querySelector("#onediff_settings_found [data-onediff-found]");
        if (!found || found.dataset.onediffFound === answered) return;
        const answer = JSON.parse(found.dataset.onediffFound);
        // An answer about what was typed before this.
        if (answer.number !== number) return;
        answered = found.dataset.onediffFound;
        for (const key of Object.keys(told.options)) {
            const row = rowOf(key);
            if (!row) continue;
            say(row, "wrong", answer.wrong[key]);
            say(row, "note", answer.wrong[key] ? "" : answer.notes[key]);
            for (const field of row.querySelectorAll("input, textarea")) {
                if (answer.wrong[key]) field.setAttribute("aria-invalid", "true");
                else field.removeAttribute("aria-invalid");
            }
        }
    }

    function look() {
        const section = document.getElementById("settings_onediff");
        if (!section || section.offsetParent === null) return;
        if (told === null) {
            const data = document.querySelector("[data-onediff-settings]");
            if (!data) return;
            told = JSON.parse(data.dataset.onediffSettings);
        }
        headings(section);
        const now = values();
        mark(section, now);
        const text = JSON.stringify(now);
        if (text !== before) {
            before = text;
            number += 1;
            const ask = document.getElementById("onediff_settings_ask");
            if (ask) ask.click();
        }
        reasons();
    }

    setInterval(look, BETWEEN_LOOKS);
    for (const coming of ["input", "change"]) document.addEventListener(coming, (event) => {
        if (event.target.closest && event.target.closest("#settings_onediff")) setTimeout(look);
    });

    return {
        // given: JSON of option keys to values, or nothing.
        show: (given) => { for (const [key, value] of Object.entries(JSON.parse(given || "{}"))) show(key, value); },
        message: () => JSON.stringify({number, values: values()}),
    };
})();
