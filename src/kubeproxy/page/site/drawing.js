// ---- Drawing: changed parts are noted, and drawn once before the next frame ---------------------------------------------

const dirty = new Set();
let current = null;

function draw(...what) {
  if (!dirty.size) requestAnimationFrame(flush);
  what.forEach((one) => dirty.add(one));
}

function flush() {
  const what = new Set(dirty);
  dirty.clear();
  drawHead();
  current.draw(what);
}

let noticed = { text: '', until: 0 };

function notice(text) {
  noticed = { text, until: now() + 8 };
  say(text);
}

function drawHead() {
  const facts = known.facts, problems = problemList();
  const wrong = problems.filter((one) => one.level === 'bad').length;
  const doubtful = problems.filter((one) => one.level === 'warn').length;
  if (facts) {
    put($('node'), facts.node);
    const up = facts.started ? ` · up ${duration(theirs() - facts.started)}` : '';
    put($('facts'), `${facts.mode} · kube-proxy ${facts.version} · pid ${facts.pid}${up}`);
  }
  badge($('n-problems'), wrong + doubtful, wrong ? 'bad' : 'warn', `${plural(wrong + doubtful, 'thing is', 'things are')} wrong`);
  badge($('n-services'), known.rows.size, '', plural(known.rows.size, 'Service'));
  const mark = wrong + doubtful ? `(${wrong + doubtful}) ` : '';
  const title = [`${stream.live ? mark : '(lost) '}${facts ? facts.node : 'kube-proxy'}`, current === serviceView ? current.name : current.label, 'kube-proxy'].join(' · ');
  if (document.title !== title) document.title = title;
  icon(!stream.live ? 'gray' : wrong ? '#c4362c' : doubtful ? '#c98a12' : '#2a8f55');
  drawLink();
}

function badge(node, value, level, label) {
  node.hidden = !value;
  put(node, value > 9999 ? `${Math.floor(value / 1000)}k` : String(value));
  node.className = `count ${level}`;
  node.setAttribute('aria-label', label);
}

function icon(colour) {
  const svg = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><circle cx="8" cy="8" r="6" fill="${colour}"/></svg>`;
  const href = `data:image/svg+xml,${encodeURIComponent(svg)}`, node = document.querySelector('link[rel=icon]');
  if (node.href !== href) node.href = href;
}

function drawLink() {
  const lost = Boolean(stream.lostAt), node = $('link');
  node.className = lost ? 'lost' : stream.live ? 'live' : '';
  document.body.classList.toggle('stale', lost && Boolean(known.facts));
  const fresh = noticed.until > now() ? noticed.text : 'live';
  put($('link-text'), lost ? `lost for ${duration(now() - stream.lostAt)}` : stream.live ? fresh : 'connecting');
  $('lost').hidden = !lost;
  if (!lost) return;
  const pid = known.facts ? ` (pid ${known.facts.pid})` : '';
  put($('lost-text'), `The connection to the proxy${pid} is lost since ${clock(stream.lostAt)}${stream.why ? `: ${stream.why}` : ''}.`);
  const shown = known.facts ? 'What is shown is from then. ' : '';
  const left = stream.nextAt - now();
  put($('lost-next'), `${shown}${left > .5 ? `Next try in ${Math.ceil(left)} s.` : 'Trying now.'}`);
}
