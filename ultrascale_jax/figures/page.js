for (const box of document.querySelectorAll('.zoom')) {
  const svg = box.querySelector('svg'), ticks = box.querySelectorAll('.ticks span');
  const [, , full, height] = svg.getAttribute('viewBox').split(' ').map(Number), step = Number(box.dataset.ms);
  let from = 0, width = full;
  const show = () => {
    width = Math.min(full, Math.max(full / 5000, width));
    from = Math.min(full - width, Math.max(0, from));
    svg.setAttribute('viewBox', `${from} 0 ${width} ${height}`);
    const digits = Math.max(1, Math.ceil(2 - Math.log10(width / full * step)));
    ticks.forEach((tick, n) => {
      tick.textContent = ((from + width * n / (ticks.length - 1)) / full * step).toFixed(digits) + ' ms';
    });
  };
  const zoom = (factor, at) => { from += width * at * (1 - factor); width *= factor; show(); };
  const place = event => event.offsetX / svg.clientWidth;
  svg.addEventListener('wheel', event => {
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, (event.clientX - svg.getBoundingClientRect().left) / svg.clientWidth);
  }, { passive: false });
  let last = null;
  svg.addEventListener('pointerdown', event => { last = event.clientX; });
  addEventListener('pointerup', () => { last = null; });
  addEventListener('pointermove', event => {
    if (last === null) return;
    from -= (event.clientX - last) / svg.clientWidth * width; last = event.clientX; show();
  });
  const moves = { in: () => zoom(0.5, 0.5), out: () => zoom(2, 0.5), left: () => { from -= width / 2; show(); },
    right: () => { from += width / 2; show(); }, all: () => { from = 0; width = full; show(); },
    detail: () => { from = Number(box.dataset.from); width = Number(box.dataset.width); show(); } };
  for (const button of box.querySelectorAll('button')) button.onclick = moves[button.dataset.move];
}
