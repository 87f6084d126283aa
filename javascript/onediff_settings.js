/* OneDiff's section of the settings page. A WebUI shows options as a plain list. This script adds headings, buttons that set
   a speed, a mark and a Reset button beside options that are not at their default, the value in force beside one that is
   not applied, and a note on values without effect on this machine. It hides options that would have no effect. The
   options come from lib_onediff/ui/settings_tab.py. */
"use strict";

window.onediffSettings = (() => {
    const BETWEEN_LOOKS = 400;
    const rowOf = (key) => document.getElementById(`setting_${key}`);
    // told: the options and speeds. checked: the server's last answer on the chosen values.
    let told = null, checked = {in_force: {}, problems: {}}, askedFor = "", wasSeen = false;

    // --- values ---

    const fieldsOf = (row) => ({
        radios: [...row.querySelectorAll("input[type=radio]")], box: row.querySelector("input[type=checkbox]"),
        field: row.querySelector("textarea, input[type=number], input[type=text]"),
    });

    function show(key, value) {
        const row = rowOf(key);
        if (!row) return;
        const {radios, box, field} = fieldsOf(row);
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
        const {radios, box, field} = fieldsOf(row);
        if (radios.length) return (radios.find((radio) => radio.checked) || {}).value;
        return box ? box.checked : field ? field.value : undefined;
    }

    const isNumber = (key) => typeof told.options[key].default === "number";
    const isAt = (key, value, wanted) => isNumber(key) ? Number(value) === wanted && value !== "" : value === wanted;
    const values = () => Object.fromEntries(Object.keys(told.options).map((key) => [key, valueOf(key)])
        .filter(([, value]) => value !== undefined));
    const showAll = (wanted) => { for (const [key, value] of Object.entries(wanted)) show(key, value); };

    // --- the server's answer: which values are in force, and which chosen ones are wrong ---

    const chosen = () => JSON.stringify(values());

    function ask() {
        const button = document.getElementById("onediff_settings_ask");
        // The options are not known before the section is first seen; the WebUI's other settings are applied without it.
        if (button && told) button.click();
    }

    function hear(seen) {
        const place = document.querySelector("[data-onediff-checked]");
        if (place) checked = JSON.parse(place.dataset.onediffChecked);
        if (seen && (!wasSeen || askedFor !== chosen())) {
            askedFor = chosen();
            ask();
        }
        wasSeen = seen;
    }

    document.addEventListener("click", (event) => {
        // The WebUI may take seconds to apply.
        if (event.target.closest && event.target.closest("#settings_submit")) for (const after of [300, 1500, 5000]) setTimeout(ask, after);
    });

    const shownAs = (value) => typeof value === "boolean" ? (value ? "on" : "off") : value === "" ? "empty" : String(value);
    const isPending = (key, now) => key in checked.in_force && key in now && !isAt(key, now[key], checked.in_force[key]);

    // --- what is shown beside the fields ---

    function element(name, className, text) {
        const made = document.createElement(name);
        made.className = className;
        made.textContent = text;
        return made;
    }

    function aButton(text, name, wanted) {
        const button = element("button", "onediff-small", text);
        button.type = "button";
        button.setAttribute("aria-label", name);
        button.addEventListener("click", () => {
            showAll(wanted);
            look();
            // Once more after gradio has drawn the page: of several clicks in between, it may keep an earlier one.
            setTimeout(() => { showAll(wanted); look(); });
        });
        return button;
    }

    // The lines below a field, from top to bottom.
    const LINES = ["wrong", "note", "pending", "changed"];

    // Write a line below a row's field, or remove it if the text is empty. Returns the element if it is new.
    function say(row, kind, text) {
        const place = row.querySelector(`:scope > .onediff-${kind}`);
        if ((place ? place.dataset.text : "") === text) return null;
        if (place) place.remove();
        if (!text) return null;
        const made = element("p", `onediff-result onediff-${kind}`, text);
        made.dataset.text = text;
        const below = LINES.slice(LINES.indexOf(kind) + 1).map((other) => `:scope > .onediff-${other}`).join(", ");
        row.insertBefore(made, below ? row.querySelector(below) : null);
        return made;
    }

    function build(section) {
        const defaults = Object.fromEntries(Object.entries(told.options).map(([key, option]) => [key, option.default]));
        const groups = new Set();
        for (const [key, {group}] of Object.entries(told.options)) {
            if (!rowOf(key) || groups.has(group)) continue;
            groups.add(group);
            rowOf(key).before(element("h2", "onediff-group", group));
        }
        const head = element("div", "onediff-settings-head", "Speed");
        for (const [name, {values: wanted, explained}] of Object.entries(told.speeds)) {
            const button = aButton(name, `Speed: ${name}`, wanted);
            button.title = explained;
            head.append(button);
        }
        head.append(aButton("Reset all to defaults", "Reset all to defaults", defaults));
        section.querySelector(".onediff-group").before(head);
        const bar = element("div", "onediff-settings-apply", ""), words = element("div", "", "");
        words.setAttribute("role", "status");
        // In a narrow window, each has a line of its own.
        words.append(element("span", "", ""), " ", element("span", "", ""));
        const apply = element("button", "onediff-small", "Apply");
        apply.type = "button";
        apply.addEventListener("click", () => document.getElementById("settings_submit").click());
        const undo = element("button", "onediff-small", "Undo");
        undo.type = "button";
        undo.addEventListener("click", () => {
            const now = values();
            showAll(Object.fromEntries(Object.entries(checked.in_force).filter(([key]) => isPending(key, now))));
            look();
        });
        bar.append(words, apply, undo);
        bar.hidden = true;
        Object.keys(told.options).map(rowOf).filter(Boolean).pop().after(bar);
        const useless = Object.values(told.options).filter((option) => option.useless);
        if (useless.length) {
            const foot = element("div", "onediff-settings-foot", "");
            const list = element("details", "onediff-folded", ""), options = useless.length === 1 ? "option has" : "options have";
            list.append(element("summary", "", `${useless.length} ${options} no effect on this machine`), element("ul", "", ""));
            for (const {label, useless: reason} of useless) list.lastChild.append(element("li", "", `${label}: ${reason}`));
            foot.append(list);
            bar.before(foot);
        }
    }

    function mark(section, now) {
        for (const [key, option] of Object.entries(told.options)) {
            const row = rowOf(key);
            if (!row) continue;
            const changed = !isAt(key, now[key], option.default);
            const isInactive = option.useless || Object.entries(option.no_effect_when).some(([other, at]) =>
                other in now && at.some((value) => isAt(other, now[other], value)));
            // A changed option stays visible: it has an effect again as soon as the other option is changed back.
            row.toggleAttribute("data-onediff-inactive", isInactive && !changed);
            row.toggleAttribute("data-onediff-changed", changed);
            const word = typeof now[key] === "boolean" ? (now[key] ? "on" : "off") : now[key];
            say(row, "note", option.notes[word] || "");
            say(row, "wrong", checked.problems[key] || "");
            row.toggleAttribute("data-onediff-pending", isPending(key, now));
            say(row, "pending", isPending(key, now) ? `Not applied. In force: ${shownAs(checked.in_force[key])}` : "");
            const text = `Default: ${option.shown === "" ? "empty" : option.shown}`;
            const place = say(row, "changed", changed ? text : "");
            if (place) {
                const label = row.querySelector("span[data-testid=block-info], label > span, span");
                const name = `Reset: ${label ? label.firstChild.textContent.trim() : key}`;
                place.append(" ", aButton("Reset", name, {[key]: option.default}));
            }
        }
        const buttons = section.querySelectorAll(".onediff-settings-head button");
        Object.entries(told.speeds).forEach(([name, {values: wanted}], place) => {
            const isAll = (held) => Object.entries(wanted).every(([key, value]) => !(key in held) || isAt(key, held[key], value));
            const isNow = isAll(now), isInForce = Object.keys(checked.in_force).length ? isAll(checked.in_force) : isNow;
            const text = name + (isNow && !isInForce ? " (not applied)" : isInForce && !isNow ? " (in force)" : "");
            if (buttons[place].textContent !== text) buttons[place].textContent = text;
            buttons[place].setAttribute("aria-pressed", isNow);
        });
        const pending = Object.keys(told.options).filter((key) => isPending(key, now)).length;
        const bar = section.querySelector(".onediff-settings-apply");
        const wrong = Object.keys(checked.problems).length;
        const words = [
            `${pending} changed ${pending === 1 ? "option is" : "options are"} not applied${wrong ? ";" : "."}`,
            wrong ? `${wrong} ${wrong === 1 ? "has a wrong value" : "have wrong values"}.` : "",
        ];
        bar.hidden = !pending;
        bar.querySelectorAll("span").forEach((place, at) => {
            if (place.textContent !== words[at]) place.textContent = words[at];
        });
    }

    function look() {
        const section = document.getElementById("settings_onediff");
        const data = document.querySelector("[data-onediff-settings]");
        const seen = Boolean(section && section.offsetParent !== null && data);
        if (seen) told = told || JSON.parse(data.dataset.onediffSettings);
        hear(seen);
        if (!seen) return;
        if (!section.querySelector(".onediff-settings-head")) build(section);
        mark(section, values());
    }

    setInterval(look, BETWEEN_LOOKS);
    for (const coming of ["input", "change"]) document.addEventListener(coming, (event) => {
        if (event.target.closest && event.target.closest("#settings_onediff")) setTimeout(look);
    });

    return {chosen};
})();
