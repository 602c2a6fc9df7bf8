// ---- The view of the URL, and the keyboard ----------------------------------------------------------------------------------

const VIEWS = { problems: problemsView, services: servicesView, service: serviceView, now: nowView };

function route() {
  const [path, query = ''] = location.hash.slice(1).split('?'), [, first, ...rest] = path.split('/');
  let part;
  try { part = rest.map(decodeURIComponent).join('/'); } catch { part = rest.join('/'); }
  const name = first === 'service' && part.includes('/') ? 'service' : first in VIEWS && first !== 'service' ? first : 'problems';
  const view = VIEWS[name];
  if (current && current !== view && current.leave) current.leave();
  const moved = current && current !== view;
  current = view;
  for (const each of Object.values(VIEWS)) $(each.section).hidden = each !== view;
  for (const tab of document.querySelectorAll('nav a')) {
    if (tab.dataset.view === name || (tab.dataset.view === 'services' && name === 'service')) tab.setAttribute('aria-current', 'page');
    else tab.removeAttribute('aria-current');
  }
  view.enter(part, new URLSearchParams(query));
  if (moved) {
    (view === servicesView ? $('grid') : $('main')).focus({ preventScroll: true });
    if (view !== servicesView) $('main').scrollTop = 0;
    say(view === serviceView ? `Service ${part}` : view.label);
  }
  draw('link');
}

const KEYS = { j: 'down', k: 'up', ArrowDown: 'down', ArrowUp: 'up', PageDown: 'pagedown', PageUp: 'pageup', Home: 'home', End: 'end', Enter: 'enter', Escape: 'escape', w: 'w', p: 'p', s: 's', l: 'l' };
const JUMPS = { 1: '#/', 2: '#/services', 3: '#/now' };
const HELP = [
  ['1 2 3', 'Problems, Services, Now'], ['/', 'search Services'], ['j k', 'next, previous; the arrows too'], ['s', 'in Services: sort'], ['l', 'in Problems: look again'], ['Enter', 'open'],
  ['Esc', 'back, or clear the search'], ['w', 'on a Service: ask why'], ['p', 'in Now: pause'], ['?', 'this'],
  ['programmed', 'the kernel has it'], ['pending', 'on its way into the kernel'], ['refused', 'the kernel does not take it'], ['differs', 'another program changed it in the kernel'], ['ignored', 'it needs no rules in the kernel'],
];

function pressed(event) {
  const { key, target } = event, writing = target.matches('input, select, textarea');
  if (event.ctrlKey || event.metaKey || event.altKey || $('help').open) return;
  if (writing && key === 'Escape') { target.blur(); if (current === servicesView) { $('grid').focus(); if (target === $('search')) servicesView.keys('escape'); } event.preventDefault(); return; }
  if (writing) return;
  if (key === '?') { $('help').showModal(); event.preventDefault(); return; }
  if (key in JUMPS) { location.hash = JUMPS[key]; return; }
  if (key === '/') {
    event.preventDefault();
    if (current !== servicesView) { location.hash = '#/services'; route(); }
    $('search').focus();
    $('search').select();
    return;
  }
  const pressing = target.matches('button, a, summary') && (key === 'Enter' || key === ' ');
  if (!pressing && key in KEYS && current.keys(KEYS[key])) event.preventDefault();
  else if (key === 'Enter' && target.matches('.problem')) { const first = target.querySelector('a'); if (first) first.click(); }
}

function boot() {
  for (const [keys, meaning] of HELP) {
    const names = keys.length > 6 ? [el('b', {}, keys)] : keys.split(' ').flatMap((key) => [el('kbd', {}, key), ' ']);
    $('help-list').append(el('dt', {}, ...names), el('dd', { class: 'dim' }, meaning));
  }
  $('help-open').addEventListener('click', () => $('help').showModal());
  $('help-close').addEventListener('click', () => $('help').close());
  $('retry').addEventListener('click', () => stream.open());
  $('skip').addEventListener('click', (event) => { event.preventDefault(); $('main').focus(); });
  document.addEventListener('keydown', pressed);
  document.addEventListener('visibilitychange', () => stream.visibility());
  addEventListener('hashchange', route);
  addEventListener('resize', () => { servicesView.measure(); serviceView.drawPicture(); draw('enter'); });
  NARROW.addEventListener('change', () => serviceView.reword());
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => draw('enter'));
  problemsView.build();
  servicesView.build();
  nowView.build();
  route();
  stream.open();
  setInterval(() => { stream.tick(); if (stream.live) second(theirs()); if (!document.hidden) draw('second'); }, 1000);
}

boot();
