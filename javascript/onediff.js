/* The Cache page: asks the server for what is new while it can be seen, and keeps what the user has opened, selected and
   focused when a part of it is drawn anew. The server's half is lib_onediff/ui/cache/panel.py. Comparing is looked at too,
   while it goes on. */
"use strict";

window.onediff = (() => {
    const BETWEEN_LOOKS = 250, WHILE_BUSY = 1000, OTHERWISE = 4000, MOST_NAMED = 5;
    const find = (selector) => document.querySelector(`#onediff_cache ${selector}`);
    const all = (selector) => [...document.querySelectorAll(`#onediff_cache ${selector}`)];
    const isSeen = (element) => element !== null && element.offsetParent !== null;

    const selectedKeys = new Set(), openKeys = new Set();
    let focused = null, cancelled = [], asked = 0, looked = 0, wasSeen = false, server;

    // --- what is kept when a part is drawn anew ---

    function keyOf(element) {
        if (!element || !element.matches) return null;
        if (element.dataset.onediffJob) return `[data-onediff-job="${element.dataset.onediffJob}"]`;
        if (element.matches("input[data-onediff-every]")) return "input[data-onediff-every]";
        if (element.matches(".onediff-table input")) return `.onediff-table input[value="${CSS.escape(element.value)}"]`;
        if (element.matches("details[data-onediff-key] > summary"))
            return `details[data-onediff-key="${CSS.escape(element.parentElement.dataset.onediffKey)}"] > summary`;
        return element.matches(".onediff-table") ? ".onediff-table" : null;
    }

    function restore() {
        const boxes = all(".onediff-table input[value]"), shown = boxes.map((box) => box.value);
        for (const box of boxes) box.checked = selectedKeys.has(box.value);
        if (boxes.length) for (const key of selectedKeys) if (!shown.includes(key)) selectedKeys.delete(key);
        const every = find("input[data-onediff-every]");
        if (every) every.checked = boxes.length > 0 && selectedKeys.size === boxes.length;
        for (const details of all("details[data-onediff-key]")) details.open = openKeys.has(details.dataset.onediffKey);
        // What an empty table has no use for, style.css hides.
        document.getElementById("onediff_cache").toggleAttribute("data-onediff-empty", !shown.length);
        // Buttons that have nothing to work on.
        const none = selectedKeys.size === 0;
        const idle = {
            pin: none, unpin: none, purge: none, purge_all: !shown.length, release: !shown.length,
            prewarm_cancel: !find("[data-onediff-job]"),
        };
        for (const [name, disabled] of Object.entries(idle)) {
            const button = find(`#onediff_${name}`);
            if (!button || button.disabled === disabled) continue;
            if (document.activeElement === button) nearest().focus();
            button.disabled = disabled;
        }
        if (focused && !isSeen(document.activeElement)) {
            const again = find(focused) || (focused.startsWith("[data-onediff-job=") && find("[data-onediff-job]"));
            (again || nearest()).focus({preventScroll: true});
        }
    }

    const nearest = () => find(".onediff-table") || find("#onediff_prewarm");

    document.addEventListener("focusin", (event) => { focused = keyOf(event.target); });
    document.addEventListener("pointerdown", () => { focused = null; });
    document.addEventListener("toggle", (event) => {
        const key = event.target.dataset && event.target.dataset.onediffKey;
        if (key && event.target.isConnected) openKeys[event.target.open ? "add" : "delete"](key);
    }, true);
    document.addEventListener("change", (event) => {
        if (!event.target.matches("#onediff_cache .onediff-table input")) return;
        const every = event.target.matches("[data-onediff-every]");
        for (const box of every ? all(".onediff-table input[value]") : [event.target]) {
            selectedKeys[event.target.checked ? "add" : "delete"](box.value);
        }
        restore();
    });
    document.addEventListener("click", (event) => {
        const button = event.target.closest && event.target.closest("#onediff_cache [data-onediff-job]");
        if (!button) return;
        cancelled.push(Number(button.dataset.onediffJob));
        asked = 0;
    });

    // --- asking the server ---

    // Numbers of handlers mean others on a server that was started anew, and one that is gone would be an error.
    async function sameServer() {
        try {
            // Since gradio 5 its routes have a prefix.
            const {api_prefix: prefix = ""} = window.gradio_config || {};
            const answer = await fetch(`.${prefix}/app_id`, {cache: "no-store"});
            const id = answer.ok ? await answer.text() : null;
            if (server === undefined) server = id;
            return id === server;
        } catch {
            return false;
        }
    }

    // --- comparing ---

    // What the txt2img tab holds, by the ends of its fields' ids.
    function txt2img() {
        const names = ["prompt", "neg_prompt", "width", "height", "steps", "cfg_scale", "sampling", "scheduler", "seed"];
        const fields = "textarea, input[type=number], input:checked, input:not([type=range], [type=file], [type=radio])";
        const found = names.map((name) => [name, document.querySelector(`#txt2img_${name}`)?.querySelector(fields)]);
        return Object.fromEntries(found.filter(([, field]) => field).map(([name, field]) => [name, field.value]));
    }

    function sayWhatIsAsked() {
        const place = document.querySelector("[data-onediff-asked]");
        if (!isSeen(place)) return;
        const {width, height, steps, sampling, seed, prompt} = txt2img();
        const text = `Now: ${width}x${height}, ${steps} steps of ${sampling}, seed ${seed}, ${prompt ? `“${prompt}”` : "no prompt"}.`;
        if (place.textContent !== text) place.textContent = text;
    }

    async function lookWhileComparing() {
        sayWhatIsAsked();

        const place = document.getElementById("onediff_compare"), button = document.getElementById("onediff_compare_look");
        const busy = isSeen(place) && !document.hidden && place.querySelector("[role=progressbar]");
        if (!busy || performance.now() - looked < WHILE_BUSY) return;
        looked = performance.now();
        if (await sameServer()) button.click();
    }

    setInterval(async () => {
        lookWhileComparing();
        const root = document.getElementById("onediff_cache");
        if (root && !root.dataset.onediffWatched) {
            root.dataset.onediffWatched = "true";
            new MutationObserver(restore).observe(root, {
                childList: true, subtree: true, attributes: true, attributeFilter: ["class", "style"],
            });
        }
        const seen = isSeen(root) && !document.hidden;
        const due = !wasSeen || performance.now() - asked > (find("[role=progressbar]") ? WHILE_BUSY : OTHERWISE);
        wasSeen = seen;
        if (!seen || !due) return;
        asked = performance.now();
        if (await sameServer()) document.getElementById("onediff_look").click();
    }, BETWEEN_LOOKS);

    return {
        // The jobs that were cancelled since the last time, and the selected rows, as JSON.
        cancelled: () => JSON.stringify(cancelled.splice(0)),
        selected: () => JSON.stringify([...selectedKeys]),
        // "512x512 of SD1, 768x768 of SD1 and 3 more", for a question.
        selectedNames() {
            const names = [...selectedKeys].map((key) => key.replace(" ", " of ")), more = names.length - MOST_NAMED;
            return more > 0 ? `${names.slice(0, MOST_NAMED).join(", ")} and ${more} more` : names.join(", ");
        },
        txt2img,
    };
})();
