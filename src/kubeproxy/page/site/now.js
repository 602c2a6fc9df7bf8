// ---- Now --------------------------------------------------------------------------------------------------------------------

const CHARTS = [
  { id: 'lag', title: 'API event to kernel', legend: 'line p50 to max, point p99 \u00b7 ', log: true, of: (s) => s.p99, low: (s) => s.p50, high: (s) => s.max, text: delay,
    big: () => (known.lag ? [delay(known.lag.p99), `p99 · p50 ${delay(known.lag.p50)} · max ${delay(known.lag.max)}`] : ['–', 'none since the page opened']), foot: (s) => `p50 ${delay(s.p50)}, p99 ${delay(s.p99)}, max ${delay(s.max)}` },
  { id: 'changes', title: 'Changes a second', bars: true, of: (s) => s.changes, text: (v) => rate(v), big: () => [rate(known.perSecond), known.queued ? `${plural(known.queued, 'Service')} on their way` : ''], foot: (s) => `${plural(s.changes, 'change')} in this second` },
  { id: 'conntrack', title: 'Connection tracking', of: (s) => s.conntrack, text: (v) => count(Math.round(v)),
    big: () => (known.conntrack ? [count(known.conntrack.count), `of ${count(known.conntrack.max)} entries, ${percent(fullness())}`] : ['–', 'not known']), foot: (s) => `${s.conntrack === null ? '–' : count(s.conntrack)} entries` },
];

const nowView = {
  section: 'now-view', label: 'Now', paused: false, charts: [], drawn: null, last: null,

  build() {
    for (const chart of CHARTS) {
      const big = el('span', { class: 'big' }, '', el('small')), canvas = el('canvas', { role: 'img', 'aria-label': chart.title }), foot = el('div', { class: 'foot' });
      const made = { ...chart, canvas, bigText: big, footNode: foot, hover: null };
      canvas.addEventListener('pointermove', (event) => { made.hover = event.offsetX; plot(made); });
      canvas.addEventListener('pointerleave', () => { made.hover = null; plot(made); });
      $('charts').append(el('figure', { class: 'chart' }, el('figcaption', {}, el('span', { class: 'cap' }, chart.title), big), canvas, foot));
      this.charts.push(made);
    }
    $('pause').addEventListener('click', () => this.pause());
  },

  enter() { this.draw(new Set(['now', 'enter'])); },

  pause() {
    this.paused = !this.paused;
    $('pause').setAttribute('aria-pressed', String(this.paused));
    put($('pause'), this.paused ? 'Go on' : 'Pause');
    draw('now');
  },

  draw(what) {
    if (what.has('now') || what.has('second') || what.has('enter')) this.charts.forEach((chart) => plot(chart));
    if (!this.paused || !this.last) this.drawFeed();
  },

  /** Add new lines at the top, and remove old lines; at most 120 lines remain. */
  drawFeed() {
    const feed = $('feed'), from = this.last ? known.feed.lastIndexOf(this.last) + 1 : 0;
    const fresh = known.feed.slice(from).slice(-120);
    if (fresh.length) {
      const none = feed.querySelector('.none');
      if (none) none.remove();
      feed.prepend(...fresh.reverse().map(feedLine));
      this.last = known.feed[known.feed.length - 1];
    } else if (!feed.children.length) {
      feed.append(el('li', { class: 'left none' }, 'Nothing has changed since the proxy started.'));
    }
    while (feed.children.length > 120) feed.lastChild.remove();
  },

  keys(key) {
    if (key === 'p') { this.pause(); return true; }
    if (key !== 'down' && key !== 'up') return false;
    const links = [...$('feed').querySelectorAll('a')], at = links.indexOf(document.activeElement);
    (links[Math.max(0, at + (key === 'down' ? 1 : -1))] || links[0] || $('main')).focus();
    return true;
  },
};

function feedLine(one) {
  if (one.left) return el('li', { class: 'left' }, `and ${plural(one.left, 'change')} more at ${clock(one.at)}`);
  const known_ = one.ms !== null && one.ms !== undefined, meter = el('i');
  // A logarithmic scale from 0.1 ms to 1 s, so that a slow change is visible at a glance.
  meter.style.width = `${known_ ? Math.max(3, Math.min(100, (Math.log10(Math.max(.1, one.ms)) + 1) * 25)) : 0}%`;
  const about = one.service ? link(one.service) : el('span', { class: 'dim' }, 'this node');
  return el('li', { class: { problem: 'bad', end: 'ok' }[one.kind] }, el('span', { class: 'mono dim' }, clock(one.at, true)), about, el('span', { title: one.what }, one.what),
    el('span', { class: 'ms' }, el('span', { class: `meter ${known_ && one.ms >= 1000 ? 'bad' : known_ && one.ms >= 100 ? 'warn' : ''}`, 'aria-hidden': 'true' }, meter), known_ ? delay(one.ms) : ''));
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function nice(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1e-9)));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}

/** Return a chart's scale: a function from values to heights, and the values of the labelled lines. */
function scaleOf(chart, seconds, high) {
  const values = seconds.map((one) => (chart.high || chart.of)(one)).filter((one) => one !== null);
  const most = Math.max(...values, 0);
  if (chart.log) {
    const top = Math.max(1, Math.ceil(Math.log10(Math.max(most, 1)))), lines = Array.from({ length: top + 2 }, (_, place) => 10 ** (place - 1));
    return { y: (v) => high - (Math.log10(Math.max(v, .1)) + 1) / (top + 1) * high, lines };
  }
  const top = chart.bars ? Math.max(nice(most), 5) : Math.max(nice(most * 1.05), 10);
  return { y: (v) => high - v / top * high, lines: [0, top / 2, top] };
}

/** Draw a chart of the last 15 minutes, or of the last minute while few seconds are known. Show the values at the pointer. */
function plot(chart) {
  const { canvas } = chart, width = canvas.clientWidth, full = canvas.clientHeight, dense = window.devicePixelRatio || 1;
  const span = chart.span = known.seconds.length > 70 ? SPAN : 60, [value, small] = chart.big();
  if (chart.bigText.firstChild.data !== value) chart.bigText.firstChild.data = value;
  put(chart.bigText.lastChild, small ? ` ${small}` : '');
  if (!width) return;
  if (canvas.width !== Math.round(width * dense)) { canvas.width = Math.round(width * dense); canvas.height = Math.round(full * dense); }
  const pen = canvas.getContext('2d'), high = full - 24, end = theirs(), seconds = known.seconds;
  pen.setTransform(dense, 0, 0, dense, 0, 0);
  pen.clearRect(0, 0, width, full);
  pen.translate(0, 6);
  const scale = scaleOf(chart, seconds, high), left = 46, x = (t) => left + (width - left - 4) * (1 - (end - t) / span);
  drawAxes(pen, chart, scale, { left, width, high, x, end });
  pen.save();
  pen.beginPath();
  pen.rect(left, -4, width - left, high + 8);
  pen.clip();
  (chart.low ? drawRanges : chart.bars ? drawBars : drawArea)(pen, chart, seconds, scale, x, Math.max(1, (width - left) / span), high);
  pen.restore();
  drawHover(pen, chart, seconds, x, high, end);
}

function drawAxes(pen, chart, scale, { left, width, high, x, end }) {
  pen.font = `11px ${colour('--sans')}`;
  pen.lineWidth = 1;
  pen.textBaseline = 'middle';
  for (const line of scale.lines) {
    const y = Math.round(scale.y(line)) + .5;
    pen.strokeStyle = colour('--line');
    pen.beginPath();
    pen.moveTo(left, y);
    pen.lineTo(width, y);
    pen.stroke();
    pen.fillStyle = colour('--dim');
    pen.textAlign = 'right';
    pen.fillText(chart.log ? (line >= 1000 ? `${line / 1000} s` : `${line} ms`) : chart.bars ? `${line}/s` : short(line), left - 6, y);
  }
  pen.textAlign = 'center';
  const step = chart.span / 5;
  for (let back = step; back < chart.span; back += step) pen.fillText(back < 60 ? `${back} s` : `${back / 60} min`, x(end - back), high + 12);
  pen.textAlign = 'right';
  pen.fillText('now', width - 2, high + 12);
}

const short = (value) => (value >= 1e6 ? `${value / 1e6}M` : value >= 1e4 ? `${value / 1e3}k` : count(value));

/** Draw each second as a line from the median to the longest delay, with the 99th percentile as a point. */
function drawRanges(pen, chart, seconds, scale, x, wide) {
  pen.lineCap = 'round';
  for (const one of seconds) {
    if (one.p99 === null) continue;
    const at = x(one.t + 1), slow = one.max >= 1000 ? '--bad' : one.max >= 100 ? '--warn' : '--accent';
    pen.strokeStyle = pen.fillStyle = colour(slow);
    pen.globalAlpha = .38;
    pen.lineWidth = Math.max(1.4, wide * .8);
    pen.beginPath();
    pen.moveTo(at, scale.y(one.p50) + .01);
    pen.lineTo(at, scale.y(one.max));
    pen.stroke();
    pen.globalAlpha = 1;
    pen.beginPath();
    pen.arc(at, scale.y(one.p99), Math.max(1.3, wide * .75), 0, 7);
    pen.fill();
  }
}

function drawBars(pen, chart, seconds, scale, x, wide, high) {
  pen.fillStyle = colour('--accent');
  for (const one of seconds) {
    const value = chart.of(one);
    if (value) pen.fillRect(x(one.t + 1) - wide / 2, scale.y(value), Math.max(1.2, wide - .6), high - scale.y(value));
  }
}

function drawArea(pen, chart, seconds, scale, x, _, high) {
  const points = seconds.filter((one) => chart.of(one) !== null).map((one) => [x(one.t + 1), scale.y(chart.of(one))]);
  if (points.length < 2) return;
  pen.beginPath();
  points.forEach(([px, py]) => pen.lineTo(px, py));
  pen.strokeStyle = pen.fillStyle = colour('--accent');
  pen.lineWidth = 1.6;
  pen.lineJoin = 'round';
  pen.stroke();
  pen.lineTo(points[points.length - 1][0], high);
  pen.lineTo(points[0][0], high);
  pen.globalAlpha = .12;
  pen.fill();
  pen.globalAlpha = 1;
}

function drawHover(pen, chart, seconds, x, high) {
  const width = seconds.length && chart.hover !== null ? 6 : 0;
  const near = width ? seconds.reduce((best, one) => (Math.abs(x(one.t + 1) - chart.hover) < Math.abs(x(best.t + 1) - chart.hover) ? one : best)) : null;
  if (!near) {
    const peak = seconds.reduce((best, one) => Math.max(best, (chart.high || chart.of)(one) ?? 0), 0);
    put(chart.footNode, seconds.length ? `${chart.legend || ''}most in ${duration(Math.min(chart.span, seconds.length))}: ${chart.text(peak)}` : '');
    chart.canvas.setAttribute('aria-label', `${chart.title}: ${chart.bigText.textContent}; ${chart.footNode.textContent}`);
    return;
  }
  pen.strokeStyle = colour('--dim');
  pen.lineWidth = 1;
  pen.beginPath();
  pen.moveTo(Math.round(x(near.t + 1)) + .5, -4);
  pen.lineTo(Math.round(x(near.t + 1)) + .5, high);
  pen.stroke();
  put(chart.footNode, `${clock(near.t)}: ${chart.foot(near)}`);
}
