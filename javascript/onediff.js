/* The OneDiff tab: asks the server for what is new while the tab can be seen, and keeps what the user has opened,
   selected and focused when a part of it is drawn anew. The server's half is lib_onediff/ui/cache/page.py. */
"use strict";

window.onediff = (() => {
    const BETWEEN_LOOKS = 250, WHILE_BUSY = 1000, OTHERWISE = 4000, LONGEST_ANSWER = 15000;
    const find = (selector) => document.querySelector(`#onediff_cache ${selector}`);
    const all = (selector) => [...document.querySelectorAll(`#onediff_cache ${selector}`)];

    const selectedKeys = new Set(), openKeys = new Set();
    let focused = null, scrolled = [0, 0], asking = null, observed = null;
    let number = 0, actions = [], sent = null, asked = 0, looking = false, wasSeen = false, heard = 0, server;

    // --- what is kept when a part is drawn anew ---

    function keyOf(element) {
        if (!element || !element.matches) return null;
        if (element.dataset.onediff) return `[data-onediff="${element.dataset.onediff}"]`;
        if (element.matches("input[data-onediff-every]")) return "input[data-onediff-every]";
        if (element.matches(".onediff-table input")) return `.onediff-table input[value="${CSS.escape(element.value)}"]`;
        if (element.matches("details[data-onediff-key] > summary"))
            return `details[data-onediff-key="${CSS.escape(element.parentElement.dataset.onediffKey)}"] > summary`;
        return element.matches(".onediff-table") ? ".onediff-table" : null;
    }

    function restore() {
        const boxes = all(".onediff-table input[value]");
        for (const box of boxes) box.checked = selectedKeys.has(box.value);
        const shown = new Set(boxes.map((box) => box.value));
        if (boxes.length) for (const key of selectedKeys) if (!shown.has(key)) selectedKeys.delete(key);
        for (const [name, waits] of Object.entries(waiting([...shown]))) {
            const button = find(`#onediff_${name}`);
            if (!button || button.disabled === waits) continue;
            const hadFocus = button === document.activeElement;
            button.disabled = waits;
            if (hadFocus) nearest().focus();
        }
        const every = find("input[data-onediff-every]");
        if (every) every.checked = boxes.length > 0 && selectedKeys.size === boxes.length;
        for (const details of all("details[data-onediff-key]")) details.open = openKeys.has(details.dataset.onediffKey);
        const table = find(".onediff-table");
        if (table && table !== observed) {
            observed = table;
            [table.scrollLeft, table.scrollTop] = scrolled;
            table.addEventListener("scroll", () => { scrolled = [table.scrollLeft, table.scrollTop]; });
        }
        moveFocus();
    }

    // Name of a button to whether there is nothing that it could be for.
    function waiting(keys) {
        const none = selectedKeys.size === 0, empty = keys.length === 0;
        const models = new Set(keys.map((key) => key.slice(key.indexOf(" "))));
        return {
            pin: none, unpin: none, purge: none, purge_all: empty, release: empty,
            prewarm_cancel: !find('[data-onediff^="cancel "]'),
            // Of which model: the list above the table says it, or there is one alone.
            purge_model: models.size !== 1,
        };
    }

    // The browser takes the focus from what was hidden or removed only later.
    const isLost = () => document.activeElement === null || document.activeElement.offsetParent === null;

    // Where the keyboard goes on from a button that is disabled now.
    const nearest = () => find(".onediff-table") || find("#onediff_prewarm");

    function moveFocus() {
        const question = find("#onediff_purge_keep");
        if (question && question.offsetParent !== null) {
            if (asking === null) {
                asking = document.activeElement;
                question.focus();
            }
        } else if (asking !== null) {
            if (isLost()) (asking.disabled ? nearest() : asking).focus();
            asking = null;
        }
        if (focused && isLost()) {
            const again = find(focused) || (focused.startsWith("[data-onediff=") && find("button[data-onediff]"));
            const usable = again && again.disabled ? again.parentElement.querySelector("button:enabled") : again;
            if (usable) usable.focus({preventScroll: true});
        }
    }

    document.addEventListener("focusin", (event) => { focused = keyOf(event.target); });
    document.addEventListener("pointerdown", () => { focused = null; });
    document.addEventListener("toggle", (event) => {
        const key = event.target.dataset && event.target.dataset.onediffKey;
        if (key && event.target.isConnected) openKeys[event.target.open ? "add" : "delete"](key);
    }, true);
    document.addEventListener("change", (event) => {
        if (!event.target.matches("#onediff_cache .onediff-table input")) return;
        const boxes = event.target.value && !event.target.matches("[data-onediff-every]")
            ? [event.target] : all(".onediff-table input[value]");
        for (const box of boxes) selectedKeys[event.target.checked ? "add" : "delete"](box.value);
        restore();
    });
    document.addEventListener("click", (event) => {
        const button = event.target.closest && event.target.closest("#onediff_cache button[data-onediff]");
        if (!button) return;
        const [action, job] = button.dataset.onediff.split(" ");
        actions.push([action, Number(job)]);
        look();
    });

    // --- asking the server ---

    async function sameServer() {
        // Numbers of handlers mean others on a server that was started anew, and one that is gone would be an error.
        try {
            const answer = await fetch("app_id", {cache: "no-store"});
            if (!answer.ok) return server === undefined || server === null;
            const id = await answer.text();
            if (server === undefined) server = id;
            return id === server;
        } catch {
            return false;
        }
    }

    function beat(name) {
        const shown = find("[data-onediff-beat]");
        return shown ? Number(shown.dataset[name]) : 0;
    }

    // An older answer may come after a newer one.
    const answered = () => (heard = Math.max(heard, beat("onediffBeat")));
    const isBusy = () => Boolean(find("[data-onediff-busy='true']"));
    const isWaiting = () => number > answered() && performance.now() - asked < LONGEST_ANSWER;

    function isSeen() {
        const root = document.getElementById("onediff_cache");
        if (root && !root.dataset.onediffWatched) {
            root.dataset.onediffWatched = "true";
            new MutationObserver(restore).observe(root, {childList: true, subtree: true, attributes: true,
                attributeFilter: ["class", "style"]});
        }
        return root !== null && root.offsetParent !== null && !document.hidden;
    }

    async function look() {
        if (looking || isWaiting()) return;
        looking = true;
        asked = performance.now();
        if (await sameServer()) {
            if (number <= answered()) number = answered() + 1;
            document.getElementById("onediff_tick").click();
        }
        looking = false;
    }

    setInterval(() => {
        const seen = isSeen();
        const since = performance.now() - asked;
        if (seen && (!wasSeen || actions.length || since > (isBusy() ? WHILE_BUSY : OTHERWISE))) look();
        wasSeen = seen;
    }, BETWEEN_LOOKS);

    return {
        // What the two events of the tab ask for; values: of all inputs, and then of all outputs.
        message: (values, count) => {
            if (sent === null || sent.number !== number) {
                sent = {number, actions};
                actions = [];
            }
            sent.turn = beat("onediffTurn");
            return [JSON.stringify(sent), ...values.slice(1, count)];
        },
        selected: (values, count) => [JSON.stringify([...selectedKeys]), ...values.slice(1, count)],
    };
})();
