/* The images of a comparison on the Compare page, in one place: a slider between the left and the right one, a flip that
   shows one in place of the other, and the difference map; of several seeds, a strip to choose from. The markup, and
   what there is to show, come from lib_onediff/ui/compare/viewer.py. */
"use strict";

window.onediffViewer = (() => {
    const BETWEEN_LOOKS = 250, SLIDER = "slider", LEFT = "left", RIGHT = "right", DIFFERENCE = "difference";
    const NAMES = [LEFT, RIGHT, DIFFERENCE];
    const viewerOf = () => document.querySelector("[data-onediff-viewer]");

    // What the user has chosen: a seed, a view (the slider, one image, or the difference map), and how many percent of
    // the width show the left image.
    const chosen = {seed: null, view: SLIDER, split: 50};
    // told: the server's description of what to show. addresses: of the images, by their names. drawn: both as text, as
    // they were when the viewer was last drawn.
    let told = null, addresses = {}, drawn = "";

    const seedShown = () => told.seeds.find(({seed}) => seed === chosen.seed) || told.seeds[0];
    const isThere = ({images}, name) => Boolean(addresses[images[name]]);

    // The chosen view, or the only image: at first a comparison has just one.
    function viewOf(shown) {
        if (isThere(shown, LEFT) && isThere(shown, RIGHT)) {
            return chosen.view === DIFFERENCE && !isThere(shown, DIFFERENCE) ? SLIDER : chosen.view;
        }
        return isThere(shown, RIGHT) ? RIGHT : LEFT;
    }

    // --- drawing ---

    function look() {
        // Nothing is compared or drawn while another tab is shown.
        const page = document.getElementById("onediff_compare");
        if (!page || !page.offsetParent) return;
        const viewer = viewerOf(), place = page.querySelector("[data-onediff-compared]");
        if (!viewer || !place) return;
        const images = [...document.querySelectorAll("#onediff_compare_gallery img")];
        const now = JSON.stringify([place.dataset.onediffCompared, images.map(({alt, src}) => [alt, src])]);
        // gradio may have replaced the viewer by an empty one.
        if (now === drawn && !viewer.hidden) return;
        told = JSON.parse(place.dataset.onediffCompared);
        addresses = Object.fromEntries(images.map(({alt, src}) => [alt, src]));
        if (!told.seeds.some((seed) => NAMES.some((name) => isThere(seed, name)))) return;
        drawn = now;
        viewer.hidden = false;
        draw();
    }

    function draw() {
        const viewer = viewerOf(), find = (selector) => viewer.querySelector(selector);
        const shown = seedShown(), view = viewOf(shown), hasBoth = isThere(shown, LEFT) && isThere(shown, RIGHT);
        const names = {...told.sides, difference: shown.difference};
        viewer.dataset.view = view;
        const [width, height] = told.size;
        viewer.style.setProperty("--onediff-width", width);
        viewer.style.setProperty("--onediff-ratio", width / height);
        for (const name of NAMES) {
            const address = addresses[shown.images[name]] || "";
            const image = find(`img[data-onediff-image=${name}]`), save = find(`[data-onediff-save=${name}]`);
            image.hidden = save.hidden = !address;
            image.alt = `Seed ${shown.seed}. ${names[name]}`;
            if (address && image.src !== address) image.src = save.href = address;
            save.download = `seed-${shown.seed}-${name}.png`;
            find(`[data-onediff-name=${name}]`).textContent = names[name];
        }
        for (const button of viewer.querySelectorAll("[data-onediff-view]")) {
            const {onediffView: own} = button.dataset;
            const isNow = own === view || own === "flip" && [LEFT, RIGHT].includes(view);
            button.setAttribute("aria-pressed", hasBoth && isNow);
            button.disabled = !hasBoth;
        }
        find("input").disabled = view !== SLIDER;
        const verdict = told.seeds.length > 1 && shown.verdict ? `Seed ${shown.seed}: ${shown.verdict}` : "";
        find("[data-onediff-verdict]").textContent = verdict;
        drawStrip(find(".onediff-strip"), shown);
        moveDivider();
    }

    function drawStrip(strip, shown) {
        const seeds = told.seeds.length > 1 ? told.seeds : [];
        while (strip.childElementCount > seeds.length) strip.lastChild.remove();
        while (strip.childElementCount < seeds.length) {
            const button = document.createElement("button");
            button.type = "button";
            button.className = "onediff-small";
            button.append(document.createElement("img"), document.createElement("span"), document.createElement("small"));
            button.firstChild.alt = "";
            strip.append(button);
        }
        seeds.forEach((each, at) => {
            const button = strip.children[at], [image, seed, psnr] = button.children;
            const address = addresses[each.images[RIGHT]] || "";
            button.dataset.onediffSeed = each.seed;
            button.setAttribute("aria-pressed", each === shown);
            if (address && image.src !== address) image.src = address;
            seed.textContent = each.seed;
            psnr.textContent = each.psnr;
        });
    }

    function moveDivider() {
        const viewer = viewerOf(), range = viewer.querySelector(".onediff-frame input");
        viewer.querySelector(".onediff-frame").style.setProperty("--onediff-split", `${chosen.split}%`);
        if (Number(range.value) !== chosen.split) range.value = chosen.split;
        range.setAttribute("aria-valuetext", `${chosen.split} % left, ${100 - chosen.split} % right`);
    }

    // --- choosing ---

    function flip() {
        chosen.view = chosen.view === LEFT ? RIGHT : LEFT;
        draw();
        viewerOf().querySelector("[role=status]").textContent = told.sides[chosen.view];
    }

    document.addEventListener("click", (event) => {
        if (!told || !event.target.closest) return;
        const button = event.target.closest("[data-onediff-viewer] :is([data-onediff-view], [data-onediff-seed])");
        if (button) {
            const {onediffView: view, onediffSeed: seed} = button.dataset;
            if (seed !== undefined) chosen.seed = Number(seed);
            else if (view !== "flip") chosen.view = view;
            if (view === "flip") flip();
            else draw();
        } else if (event.target.closest(".onediff-frame") && [LEFT, RIGHT].includes(chosen.view)) flip();
    });

    document.addEventListener("input", (event) => {
        if (!event.target.matches("[data-onediff-viewer] .onediff-frame input")) return;
        chosen.split = Number(event.target.value);
        moveDivider();
    });

    // In some browsers, a touch on a range input works on its thumb alone, so the frame handles pointers itself.
    function moveTo(frame, event) {
        const {left, width} = frame.getBoundingClientRect();
        chosen.split = Math.round(100 * Math.min(1, Math.max(0, (event.clientX - left) / width)));
        moveDivider();
    }

    const frameAt = (event) => event.target.closest && event.target.closest("[data-view=slider] > .onediff-frame");
    document.addEventListener("pointerdown", (event) => {
        const frame = frameAt(event);
        if (!told || !frame || event.button) return;
        frame.setPointerCapture(event.pointerId);
        moveTo(frame, event);
    });
    document.addEventListener("pointermove", (event) => {
        const frame = frameAt(event);
        if (told && frame && frame.hasPointerCapture(event.pointerId)) moveTo(frame, event);
    });
    document.addEventListener("pointerup", (event) => {
        const frame = frameAt(event);
        // The arrow keys go on from there.
        if (frame) frame.querySelector("input").focus({preventScroll: true, focusVisible: false});
    });

    setInterval(look, BETWEEN_LOOKS);
})();
