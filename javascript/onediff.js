/* The pages Cache and Compare. While one of them is visible, this script asks the server for changes. When gradio replaces
   a part of the page, the script restores which rows are selected, which details are open, and where the focus is. The
   server's side is lib_onediff/ui/cache/panel.py and lib_onediff/ui/compare/tab.py; both show the list of jobs from
   lib_onediff/ui/jobs.py. */
"use strict";

window.onediff = (() => {
    const BETWEEN_LOOKS = 250, WHILE_BUSY = 1000, OTHERWISE = 4000, MOST_NAMED = 5;
    const find = (selector) => document.querySelector(`#onediff_cache ${selector}`);
    const all = (selector) => [...document.querySelectorAll(`#onediff_cache ${selector}`)];
    const isSeen = (element) => element !== null && element.offsetParent !== null;

    const selectedKeys = new Set(), openKeys = new Set();
    // Of each page: the id of its root, and of the hidden button that asks the server for changes.
    const PAGES = [["onediff_cache", "onediff_look"], ["onediff_compare", "onediff_compare_look"]];
    const JOB_BUTTONS = "[data-onediff-job], [data-onediff-show], [data-onediff-clear]";
    const BUTTONS = `${JOB_BUTTONS}, [data-onediff-sort], [data-onediff-size]`;
    const askedAt = {}, wasSeen = {};
    let focused = null, cancelled = [], clear = false, shown = 0, sizes = [], sort = "", descending = false, server;

    // --- what is restored after gradio has replaced a part of the page ---

    // A selector that finds an element again in new markup; null for an element that is never replaced.
    function keyOf(element) {
        if (!element || !element.matches) return null;
        for (const name of element.matches(BUTTONS) ? ["job", "show", "clear", "sort", "size"] : []) {
            const value = element.getAttribute(`data-onediff-${name}`);
            if (value !== null) return `[data-onediff-${name}="${CSS.escape(value)}"]`;
        }
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
        // style.css hides the controls that an empty table, or a machine without a GPU, has no use for.
        document.getElementById("onediff_cache").toggleAttribute("data-onediff-empty", !shown.length);
        document.getElementById("onediff_cache").toggleAttribute("data-onediff-no-gpu", Boolean(find(".onediff-no-gpu")));
        // A button is disabled while there is nothing for it to act on.
        const none = selectedKeys.size === 0;
        const idle = {
            pin: none, unpin: none, purge: none, purge_all: !shown.length, release: !shown.length,
            prewarm_cancel: !find("[data-onediff-kind=prewarm] [data-onediff-job]"),
        };
        for (const [name, disabled] of Object.entries(idle)) {
            const button = find(`#onediff_${name}`);
            if (!button || button.disabled === disabled) continue;
            if (document.activeElement === button) nearest().focus();
            button.disabled = disabled;
        }
        if (focused && !isSeen(document.activeElement)) {
            const again = find(focused) || (focused.startsWith("[data-onediff-") && find(JOB_BUTTONS));
            (again || nearest()).focus({preventScroll: true});
        }
    }

    // On the Compare page, only the buttons in the list of jobs are replaced.
    function restoreFocusInCompare() {
        if (!focused || isSeen(document.activeElement) && document.activeElement !== document.body) return;
        const inCompare = (selector) => document.querySelector(`#onediff_compare ${selector}`);
        const again = inCompare(focused) || inCompare("#onediff_compare_start");
        if (isSeen(again)) again.focus({preventScroll: true});
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
        if (!event.target.closest) return;
        // Whoever starts a comparison wants to see that one, which is the newest.
        if (event.target.closest("#onediff_compare_start")) shown = 0;
        const button = event.target.closest(BUTTONS.replaceAll("[", "#tab_onediff ["));
        if (!button) return;
        const {onediffJob: job, onediffShow: show, onediffSize: size, onediffSort: column} = button.dataset;
        if (job) cancelled.push(Number(job));
        else if (show) showComparison(Number(show));
        else if (size) sizes.push(size);
        else if (column) {
            descending = sort === column && !descending;
            sort = column;
        } else clear = true;
        for (const [root] of PAGES) askedAt[root] = 0;
    });

    function showComparison(id) {
        shown = id;
        if (isSeen(document.getElementById("onediff_compare"))) return;
        const tabs = [...document.querySelectorAll("#onediff_pages button")];
        const tab = tabs.find((button) => button.textContent.trim() === "Compare");
        if (tab) tab.click();
    }

    // --- asking the server ---

    // Whether the server is the one that made this page. A restarted server may number its handlers differently: a click
    // would call another one, or raise.
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

    // The values of the txt2img tab's fields, by the ends of their ids.
    function txt2img() {
        const names = ["prompt", "neg_prompt", "width", "height", "steps", "cfg_scale", "sampling", "scheduler", "seed"];
        const fields = "textarea, input[type=number], input:checked, input:not([type=range], [type=file], [type=radio])";
        const found = names.map((name) => [name, document.querySelector(`#txt2img_${name}`)?.querySelector(fields)]);
        return Object.fromEntries(found.filter(([, field]) => field).map(([name, field]) => [name, field.value]));
    }

    // The settings in the txt2img tab's accordion. They are read from its fields, because its title changes only after the
    // server's answer. Before the accordion is first opened, gradio 6 has no fields, and the title has the settings.
    function accordion() {
        const box = document.querySelector("#onediff_txt2img_enabled input");
        const title = document.querySelector("#onediff_txt2img_set_here [data-onediff-set-here]");
        const [preset, text] = title ? JSON.parse(title.dataset.onediffSetHere) : [];
        const list = document.querySelector("#onediff_txt2img_preset input");
        const field = document.querySelector("#onediff_txt2img_changes :is(textarea, input)");
        const held = {
            enabled: box ? box.checked : undefined, preset: list && list.value ? list.value : preset,
            changes: field ? field.value : text,
        };
        return Object.fromEntries(Object.entries(held).filter(([, value]) => value !== undefined && value !== null));
    }

    // Says on the Compare page which image it would make, and what "Current settings" are.
    function sayWhatIsAsked() {
        const place = document.querySelector("[data-onediff-asked]");
        if (!isSeen(place)) return;
        const {width, height, steps, sampling, seed, prompt} = txt2img(), {enabled, preset, changes} = accordion();
        const current = enabled === false ? "off for this run" : [preset, changes].filter((part) => part).join("; ");
        const asked = `${width}x${height}, ${steps} steps of ${sampling}, seed ${seed}, ${prompt ? `“${prompt}”` : "no prompt"}`;
        const text = `Now: ${asked}.${current ? ` Current settings: ${current}.` : ""}`;
        if (place.textContent !== text) place.textContent = text;
    }

    // Asks the server for changes of a page that is visible, once its pause is over.
    async function lookAt([id, button]) {
        const root = document.getElementById(id);
        if (root && !root.dataset.onediffWatched) {
            root.dataset.onediffWatched = "true";
            new MutationObserver(id === "onediff_cache" ? restore : restoreFocusInCompare).observe(root, {
                childList: true, subtree: true, attributes: true, attributeFilter: ["class", "style"],
            });
        }
        const seen = isSeen(root) && !document.hidden;
        const pause = seen && root.querySelector(".onediff-job:is(.onediff-job-running, .onediff-job-queued)") ? WHILE_BUSY : OTHERWISE;
        const due = !wasSeen[id] || performance.now() - (askedAt[id] || 0) > pause;
        wasSeen[id] = seen;
        if (!seen || !due) return;
        askedAt[id] = performance.now();
        if (await sameServer()) document.getElementById(button).click();
    }

    setInterval(() => {
        sayWhatIsAsked();
        PAGES.forEach(lookAt);
    }, BETWEEN_LOOKS);

    return {
        // The clicks since the last call, as JSON.
        clicks() {
            const {width, height} = txt2img();
            const clicked = {
                cancelled: cancelled.splice(0), clear, shown, sizes: sizes.splice(0), sort, descending, asked: `${width}x${height}`,
            };
            clear = false;
            return JSON.stringify(clicked);
        },
        // The keys of the selected rows, as JSON.
        selected: () => JSON.stringify([...selectedKeys]),
        // The selected rows for a question: "512x512 of SD1, 768x768 of SD1 and 3 more".
        selectedNames() {
            const names = [...selectedKeys].map((key) => key.replace(" ", " of ")), more = names.length - MOST_NAMED;
            return more > 0 ? `${names.slice(0, MOST_NAMED).join(", ")} and ${more} more` : names.join(", ");
        },
        // The fields of the txt2img tab and its accordion, as JSON.
        compare: () => JSON.stringify({...txt2img(), ...accordion()}),
    };
})();
