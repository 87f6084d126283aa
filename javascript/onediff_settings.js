/* The settings tab shows what it was given when the page was opened: when OneDiff's Presets page has changed options,
   they are brought up to date there, as applying the tab would bring the old values back. */
"use strict";

window.onediffSettings = (() => {
    function type(field, value) {
        field.value = value;
        field.dispatchEvent(new Event("input", {bubbles: true}));
    }

    function show(key, value) {
        const setting = document.getElementById(`setting_${key}`);
        if (!setting) return;
        const radios = [...setting.querySelectorAll("input[type=radio]")];
        const box = setting.querySelector("input[type=checkbox]");
        const field = setting.querySelector("textarea, input[type=number], input[type=text]");
        if (radios.length) {
            const chosen = radios.find((radio) => radio.value === value);
            if (chosen && !chosen.checked) chosen.click();
        } else if (box) {
            if (box.checked !== value) box.click();
        } else if (field) {
            type(field, value);
        }
    }

    return {
        // values: JSON of option keys to values, or nothing.
        show: (values) => { for (const [key, value] of Object.entries(JSON.parse(values || "{}"))) show(key, value); },
    };
})();
