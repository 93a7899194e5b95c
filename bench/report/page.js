// Draws the report from the data in the page. SPDX-License-Identifier: Apache-2.0
'use strict';
(() => {
  const data = JSON.parse(document.getElementById('data').textContent);
  const $ = (id) => document.getElementById(id);
  const color = (lane) => getComputedStyle(document.documentElement).getPropertyValue('--lane-' + lane).trim();
  const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim();
  const add = (parent, tag, text, name) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (name) element.className = name;
    parent.appendChild(element);
    return element;
  };

  // --- numbers as text -----------------------------------------------------------------------------------------------
  const known = (value) => typeof value === 'number' && Number.isFinite(value);
  const fixed = (value, digits) => (known(value) ? value.toFixed(digits) : 'n/a');
  const bytesText = (value) => {
    if (!known(value)) return 'n/a';
    const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
    let i = 0;
    for (; value >= 1024 && i + 1 < units.length; ++i) value /= 1024;
    return value.toFixed(i === 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2) + ' ' + units[i];
  };
  const rateText = (value) => value >= 1e9 ? fixed(value / 1e9, 2) + ' GB/s' :
      value >= 1e6                         ? fixed(value / 1e6, 1) + ' MB/s' :
                                             fixed(value / 1e3, 1) + ' kB/s';
  const timeText = (ns) => {
    const size = Math.abs(ns);
    if (size >= 1e9) return (ns / 1e9).toFixed(3) + ' s';
    if (size >= 1e6) return (ns / 1e6).toFixed(2) + ' ms';
    return (ns / 1e3).toFixed(1) + ' \u00b5s';
  };
  const countText = (value) => {
    if (!known(value)) return 'n/a';
    if (value >= 1e9) return (value / 1e9).toFixed(2) + ' G';
    if (value >= 1e6) return (value / 1e6).toFixed(1) + ' M';
    return Math.round(value).toLocaleString('en');
  };

  // --- spans, packed into rows in which they follow one another, so that a row can be searched by halves
  // ---------------
  const spans = data.spans;
  const lanes = data.lanes.map((name, index) => ({name, index, rows: []}));
  for (let i = 0; i < spans.lane.length; ++i) {
    const rows = lanes[spans.lane[i]].rows;
    let row = rows.find((each) => each.end <= spans.begin_ns[i]);
    if (!row) rows.push((row = {items: [], end: 0}));
    row.items.push(i);
    row.end = spans.begin_ns[i] + spans.duration_ns[i];
  }
  let last = 1;
  for (const lane of lanes)
    for (const row of lane.rows) last = Math.max(last, row.end);
  for (const [, end] of data.steps) last = Math.max(last, end);
  const endOf = (i) => spans.begin_ns[i] + spans.duration_ns[i];
  // The first of items whose end lies after t.
  const firstAfter = (items, t) => {
    let low = 0, high = items.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (endOf(items[middle]) > t)
        high = middle;
      else
        low = middle + 1;
    }
    return low;
  };

  const view = {begin: 0, end: last};
  const kLeastNs = 2000;
  const show = (begin, end) => {
    const span = Math.min(Math.max(end - begin, kLeastNs), last * 1.02);
    begin = Math.min(Math.max(begin, -0.01 * last), last * 1.01 - span);
    view.begin = begin;
    view.end = begin + span;
    schedule();
  };
  const zoom = (factor, at) => {
    const center = at === undefined ? (view.begin + view.end) / 2 : at;
    show(center - (center - view.begin) * factor, center + (view.end - center) * factor);
  };
  const pan = (share) => {
    const by = (view.end - view.begin) * share;
    show(view.begin + by, view.end + by);
  };

  // --- drawing -------------------------------------------------------------------------------------------------------
  const kLabelPx = 14, kAxisPx = 20, kGapPx = 6;
  const laneHeight = (lane) => kLabelPx + Math.max(14, Math.min(64, 8 * Math.max(1, lane.rows.length)));
  const timeline = $('timeline'), bandwidth = $('bandwidth');
  const height = kAxisPx + lanes.reduce((sum, lane) => sum + laneHeight(lane) + kGapPx, 0);
  timeline.style.height = height + 'px';
  const prepare = (canvas) => {
    const scale = window.devicePixelRatio || 1;
    const width = canvas.clientWidth, tall = canvas.clientHeight;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(tall * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(tall * scale);
    }
    const context = canvas.getContext('2d');
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, tall);
    context.font = '11px system-ui, sans-serif';
    return {context, width, tall};
  };
  const ticks = (width) => {
    const rough = (view.end - view.begin) / Math.max(2, Math.floor(width / 110));
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((x) => x * power).find((x) => x >= rough);
    const list = [];
    for (let t = Math.ceil(view.begin / step) * step; t <= view.end; t += step)
      list.push(Math.abs(t) < step / 2 ? 0 : t);
    const digits = (unit) => Math.max(0, Math.ceil(-Math.log10(step / unit) - 1e-9));
    const unit = last >= 1e9 && step >= 1e6 ? 1e9 : step >= 1e3 ? 1e6 : 1e3;
    const name = unit === 1e9 ? ' s' : unit === 1e6 ? ' ms' : ' \u00b5s';
    return list.map((t) => ({t, text: (t / unit).toFixed(digits(unit)) + name}));
  };
  const backdrop = (area, top) => {
    const {context, width, tall} = area;
    const x = (t) => ((t - view.begin) / (view.end - view.begin)) * width;
    data.steps.forEach(([begin, end], i) => {
      if (end < view.begin || begin > view.end || i % 2 === 1) return;
      context.fillStyle = ink('step');
      context.fillRect(x(begin), top, x(end) - x(begin), tall - top);
    });
    return x;
  };
  const drawTimeline = () => {
    const area = prepare(timeline);
    const {context, width, tall} = area;
    const x = backdrop(area, kAxisPx);
    context.textBaseline = 'middle';
    for (const tick of ticks(width)) {
      context.fillStyle = ink('line');
      context.fillRect(Math.round(x(tick.t)), kAxisPx, 1, tall - kAxisPx);
      context.fillStyle = ink('soft');
      const room = context.measureText(tick.text).width;
      context.fillText(tick.text, Math.min(Math.max(0, x(tick.t) - room / 2), width - room), kAxisPx / 2);
    }
    let top = kAxisPx;
    for (const lane of lanes) {
      const tallLane = laneHeight(lane) - kLabelPx;
      context.fillStyle = ink('soft');
      context.fillText(lane.name + (lane.rows.length ? '' : ' (no tasks)'), 2, top + kLabelPx / 2);
      context.fillStyle = color(lane.index);
      const rowTall = tallLane / Math.max(1, lane.rows.length);
      lane.rows.forEach((row, r) => {
        const y = top + kLabelPx + r * rowTall;
        const items = row.items;
        // What begins within a pixel that is painted already is passed over by another search.
        for (let k = firstAfter(items, view.begin); k < items.length && spans.begin_ns[items[k]] < view.end;) {
          const left = x(spans.begin_ns[items[k]]), right = x(endOf(items[k]));
          const wide = Math.max(right - left, 0.7);
          context.fillRect(left, y, wide > 3 ? wide - 0.5 : wide, Math.max(rowTall - (rowTall > 4 ? 1 : 0), 0.7));
          if (right - left >= 1) {
            ++k;
            continue;
          }
          k = Math.max(k + 1, firstAfter(items, view.begin + ((left + 0.7) / width) * (view.end - view.begin)));
        }
      });
      top += laneHeight(lane) + kGapPx;
    }
    $('range').textContent = timeText(view.begin) + ' to ' + timeText(view.end);
  };
  const moving = lanes.filter((lane) => lane.index < 5);
  const drawBandwidth = () => {
    const area = prepare(bandwidth);
    const {context, width, tall} = area;
    backdrop(area, 0);
    const bins = Math.max(20, Math.floor(width / 3));
    const binNs = (view.end - view.begin) / bins;
    let most = 0;
    const curves = moving.map((lane) => {
      const rate = new Float64Array(bins);
      for (const row of lane.rows) {
        for (let k = firstAfter(row.items, view.begin); k < row.items.length; ++k) {
          const i = row.items[k];
          if (spans.begin_ns[i] >= view.end) break;
          if (!spans.bytes[i]) continue;
          // A span's bytes are taken to flow evenly over its time.
          const from = (spans.begin_ns[i] - view.begin) / binNs,
                to = Math.max((endOf(i) - view.begin) / binNs, from + 1e-9);
          const density = spans.bytes[i] / (to - from);
          for (let b = Math.max(0, Math.floor(from)); b < Math.min(bins, Math.ceil(to)); ++b)
            rate[b] += density * Math.max(0, Math.min(to, b + 1) - Math.max(from, b));
        }
      }
      for (let b = 0; b < bins; ++b) most = Math.max(most, (rate[b] /= binNs * 1e-9));
      return rate;
    });
    if (most === 0) most = 1;
    const rough = most / 3, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((v) => v * power).find((v) => v >= rough);
    const y = (rate) => tall - 4 - (rate / (most * 1.05)) * (tall - 16);
    context.textBaseline = 'bottom';
    for (let v = step; v <= most * 1.05; v += step) {
      context.fillStyle = ink('line');
      context.fillRect(0, Math.round(y(v)), width, 1);
    }
    context.lineWidth = 1.5;
    curves.forEach((rate, c) => {
      if (!moving[c].rows.length) return;
      context.strokeStyle = color(moving[c].index);
      context.beginPath();
      for (let b = 0; b < bins; ++b) context.lineTo(((b + 0.5) / bins) * width, y(rate[b]));
      context.stroke();
    });
    for (let v = step; v <= most * 1.05; v += step) {
      const text = rateText(v), room = context.measureText(text).width;
      context.fillStyle = ink('card');
      context.fillRect(0, y(v) - 13, room + 4, 12);
      context.fillStyle = ink('soft');
      context.fillText(text, 2, y(v) - 1);
    }
  };
  let due = false;
  const schedule = () => {
    if (due) return;
    due = true;
    requestAnimationFrame(() => {
      due = false;
      drawTimeline();
      drawBandwidth();
    });
  };

  // --- mouse, touch, keyboard
  // ------------------------------------------------------------------------------------------
  const timeAt = (clientX) => {
    const box = timeline.getBoundingClientRect();
    return view.begin + ((clientX - box.left) / box.width) * (view.end - view.begin);
  };
  const tell = (event) => {
    const box = timeline.getBoundingClientRect(), t = timeAt(event.clientX);
    const slack = ((view.end - view.begin) / box.width) * 2;
    let top = kAxisPx;
    for (const lane of lanes) {
      const y = event.clientY - box.top - top - kLabelPx;
      const tall = laneHeight(lane) - kLabelPx;
      top += laneHeight(lane) + kGapPx;
      if (y < 0 || y >= tall || !lane.rows.length) continue;
      const items = lane.rows[Math.min(lane.rows.length - 1, Math.floor((y / tall) * lane.rows.length))].items;
      const k = firstAfter(items, t - slack);
      if (k >= items.length || spans.begin_ns[items[k]] > t + slack) return;
      const i = items[k];
      const unit = spans.unit[i] < 0 ? '' : ' ' + data.units[spans.unit[i]] + ', chunk ' + spans.chunk[i];
      const moved = spans.bytes[i] ?
          ', ' + bytesText(spans.bytes[i]) + ' at ' + rateText(spans.bytes[i] / (spans.duration_ns[i] * 1e-9)) :
          '';
      $('readout').textContent = lane.name + ': ' + spans.what_names[spans.what[i]] + unit + '; ' +
          timeText(spans.duration_ns[i]) + ' from ' + timeText(spans.begin_ns[i]) + moved;
      return;
    }
  };
  const pointers = new Map();
  let pinch = null;
  const apart = () => {
    const [a, b] = [...pointers.values()];
    return {center: timeAt((a + b) / 2), distance: Math.max(8, Math.abs(a - b))};
  };
  timeline.addEventListener('pointerdown', (event) => {
    pointers.set(event.pointerId, event.clientX);
    timeline.setPointerCapture(event.pointerId);
    pinch = pointers.size === 2 ? apart() : null;
    tell(event);
  });
  timeline.addEventListener('pointermove', (event) => {
    if (!pointers.has(event.pointerId)) return tell(event);
    const before = pointers.get(event.pointerId);
    pointers.set(event.pointerId, event.clientX);
    if (pointers.size === 1) {
      const by = ((before - event.clientX) / timeline.clientWidth) * (view.end - view.begin);
      return show(view.begin + by, view.end + by);
    }
    if (!pinch || pointers.size !== 2) return undefined;
    const now = apart();
    zoom(pinch.distance / now.distance, now.center);
    pinch = apart();
    return undefined;
  });
  for (const name of ['pointerup', 'pointercancel'])
    timeline.addEventListener(name, (event) => {
      pointers.delete(event.pointerId);
      pinch = null;
    });
  timeline.addEventListener('wheel', (event) => {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY * 0.005))), timeAt(event.clientX));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      pan((event.deltaX || event.deltaY) / timeline.clientWidth);
    }
  }, {passive: false});
  timeline.addEventListener('dblclick', (event) => zoom(0.4, timeAt(event.clientX)));
  const keys = {
    ArrowLeft: () => pan(-0.15),
    ArrowRight: () => pan(0.15),
    '+': () => zoom(0.6),
    '=': () => zoom(0.6),
    ArrowUp: () => zoom(0.6),
    ArrowDown: () => zoom(1 / 0.6),
    '-': () => zoom(1 / 0.6),
    Home: () => show(0, last),
    '0': () => show(0, last),
    End: () => lastStep(),
  };
  timeline.addEventListener('keydown', (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  const lastStep = () => {
    const steps = data.timed_steps.length ? data.timed_steps : data.steps;
    if (!steps.length) return show(0, last);
    const [begin, end] = steps[steps.length - 1];
    return show(begin - 0.02 * (end - begin), end + 0.02 * (end - begin));
  };
  $('zoom-in').onclick = () => zoom(0.6);
  $('zoom-out').onclick = () => zoom(1 / 0.6);
  $('pan-left').onclick = () => pan(-0.4);
  $('pan-right').onclick = () => pan(0.4);
  $('one-step').onclick = lastStep;
  $('fit').onclick = () => show(0, last);

  // --- the rest of the page
  // --------------------------------------------------------------------------------------------
  const figures = data.figures, limit = data.limit;
  const parameters = figures.parameters, share = parameters / (figures.world_size || 1);
  const card = (value, name) => {
    const box = add($('cards'), 'div', undefined, 'card');
    add(box, 'b', value);
    add(box, 'span', name);
  };
  const seconds = (value) => (known(value) ? timeText(value * 1e9) : 'n/a');
  const mean =
      data.timed_steps.reduce((sum, [begin, end]) => sum + (end - begin), 0) / (data.timed_steps.length || NaN);
  card(known(mean) ? timeText(mean) : 'n/a', 'a step, mean of ' + data.timed_steps.length + ' measured');
  card(countText(parameters), 'parameters');
  if (known(figures.tokens_per_second)) card(countText(figures.tokens_per_second), 'tokens per second');
  card(fixed(figures.efficiency, 2), 'efficiency (bound / actual)');
  card(
      known(mean) ? Math.round(100 * limit.compute_idle_seconds / (limit.step_seconds || NaN)) + ' %' : 'n/a',
      'of a step compute stood still');
  for (const each of [...$('cards').querySelectorAll('b')])
    if (each.textContent.includes('NaN')) each.textContent = 'n/a';

  const keyOf = (name) => name.replaceAll(' ', '_');
  const laneTable = $('lanes');
  const head = add(add(laneTable, 'thead'), 'tr');
  for (const [i, text] of ['Lane', 'Busy', 'Share', 'Not hidden', 'Tasks shown'].entries()) {
    const cell = add(head, 'th', text, i > 0 ? 'number' : '');
    cell.scope = 'col';
  }
  const laneBody = add(laneTable, 'tbody');
  for (const lane of lanes) {
    const row = add(laneBody, 'tr');
    const name = add(row, 'td');
    add(name, 'i', '', 'swatch').style.background = 'var(--lane-' + lane.index + ')';
    name.append(lane.name);
    const busy = limit.busy_seconds[keyOf(lane.name)];
    const whole = limit.steps > 0;
    add(row, 'td', whole ? seconds(busy) : 'n/a', 'number');
    add(row, 'td', whole ? fixed((100 * busy) / limit.step_seconds, 0) + ' %' : 'n/a', 'number');
    const open =
        lane.name === 'compute' || !limit.compute_seen ? '' : seconds(limit.not_hidden_seconds[keyOf(lane.name)]);
    add(row, 'td', whole ? open : 'n/a', 'number');
    add(row, 'td', countText(lane.rows.reduce((sum, each) => sum + each.items.length, 0)), 'number');
  }
  for (const lane of moving) {
    if (!lane.rows.length) continue;
    const item = add($('legend'), 'li');
    add(item, 'i', '', 'swatch').style.background = 'var(--lane-' + lane.index + ')';
    item.append(lane.name);
  }

  const track = (parent, parts, whole, text) => {
    const bar = add(parent, 'div', undefined, 'track');
    bar.setAttribute('role', 'img');
    bar.setAttribute('aria-label', text);
    parts.forEach((part) => {
      const piece = add(bar, 'i');
      piece.style.width = (100 * part.bytes) / whole + '%';
      piece.style.background = 'var(--lane-' + (part.color % 7) + ')';
    });
  };
  const keyList = (parent, parts, text) => {
    const list = add(parent, 'ul', undefined, 'legend');
    parts.forEach((part) => {
      const item = add(list, 'li');
      add(item, 'i', '', 'swatch').style.background = 'var(--lane-' + (part.color % 7) + ')';
      item.append(part.name + ' ' + text(part.bytes));
    });
  };
  const tier = (name, memory) => {
    const box = add($('memory'), 'div', undefined, 'tier');
    const parts = memory.parts.map((part, i) => ({...part, color: i}));
    const line = add(box, 'p', undefined);
    add(line, 'b', name);
    line.append(': ' + bytesText(memory.peak) + ' of ' + bytesText(memory.budget) + ' budget');
    if (memory.peak > memory.budget) add(line, 'span', ' over budget', 'over');
    track(box, parts, Math.max(memory.budget, memory.peak, 1), name + ' memory: ' + line.textContent);
    keyList(box, parts, bytesText);
  };
  tier('Device', data.memory.device);
  tier('Host', data.memory.host);
  const rest = add($('memory'), 'p');
  rest.append('NVMe: ' + bytesText(data.memory.nvme.stored) + ' of states stored.');
  if (figures.peak_bytes)
    rest.append(' Largest resident set of the process: ' + bytesText(figures.peak_bytes.resident_set) + '.');

  const perStep =
      Object.entries(figures.bytes_per_step || {})
          .map(
              ([name, bytes], i) =>
                  ({name: name.replaceAll('_', ' '), bytes: known(bytes) && share > 0 ? bytes / share : 0, color: i}));
  const mostPer = Math.max(...perStep.map((each) => each.bytes), 1e-9);
  for (const each of perStep) {
    const box = add($('bytes'), 'div', undefined, 'tier');
    add(box, 'p', each.name + ': ' + each.bytes.toFixed(2) + ' B');
    track(box, [each], mostPer, each.name + ': ' + each.bytes.toFixed(2) + ' bytes per parameter and step');
  }

  const plain = (value) => {
    if (Array.isArray(value)) {
      const text = value.slice(0, 8).map(plain).join(', ');
      return value.length > 8 ? text + ', ... (' + value.length + ')' : text;
    }
    if (value === null) return 'n/a';
    if (typeof value === 'object') return Object.entries(value).map(([k, v]) => k + ': ' + plain(v)).join(', ');
    if (typeof value === 'number' && !Number.isInteger(value)) return String(Number(value.toPrecision(6)));
    return typeof value === 'number' ? value.toLocaleString('en') : String(value);
  };
  const table = (body, object, prefix, leave) => {
    for (const [key, value] of Object.entries(object)) {
      if (leave.includes(key)) continue;
      if (value !== null && typeof value === 'object' && !Array.isArray(value)) {
        table(body, value, prefix + key + '.', []);
        continue;
      }
      const row = add(body, 'tr');
      const name = add(row, 'th', prefix + key);
      name.scope = 'row';
      add(row, 'td', plain(value));
    }
  };
  table(add($('figures'), 'tbody'), figures, '', ['configuration', 'limit']);
  table(add($('configuration'), 'tbody'), figures.configuration || {}, '', []);

  timeline.setAttribute(
      'aria-label',
      'Timeline of ' + spans.lane.length + ' tasks in ' + lanes.length + ' lanes over ' + timeText(last) + ', ' +
          data.steps.length + ' steps. ' + limit.sentence + '. The table of lanes below says the same in numbers.');
  bandwidth.setAttribute('aria-label', 'Bytes per second of each lane over the part of the timeline that is shown');
  window.addEventListener('resize', schedule);
  if (window.matchMedia) {
    const dark = window.matchMedia('(prefers-color-scheme: dark)');
    if (dark.addEventListener) dark.addEventListener('change', schedule);
  }
  lastStep();
  document.documentElement.dataset.ready = 'yes';
})();
