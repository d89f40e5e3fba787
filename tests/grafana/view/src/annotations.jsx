// Events as dashed lines, and those that last as a tint, as Grafana's time series panel draws them.
import { useLayoutEffect } from 'react';
import { colorManipulator } from '@grafana/data';

const values = (frame, name) => frame.fields.find((field) => field.name === name)?.values ?? [];

export const eventsOf = (frames, theme) =>
  frames.flatMap((frame) =>
    values(frame, 'time').map((time, i) => ({
      time,
      end: values(frame, 'isRegion')[i] ? values(frame, 'timeEnd')[i] : time,
      colour: theme.visualization.getColorByName(values(frame, 'color')[i] || 'blue'),
    }))
  );

export function Annotations({ config, events }) {
  useLayoutEffect(() => {
    config.addHook('draw', ({ ctx, bbox, valToPos }) => {
      ctx.save();
      ctx.beginPath();
      ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
      ctx.clip();
      for (const { time, end, colour } of events) {
        const [left, right] = [time, end].map((t) => valToPos(t, 'x', true));
        ctx.fillStyle = colorManipulator.alpha(colour, 0.1);
        ctx.fillRect(left, bbox.top, right - left, bbox.height);
        ctx.strokeStyle = colour;
        ctx.lineWidth = 2;
        ctx.setLineDash([5, 5]);
        for (const x of new Set([left, right])) {
          ctx.beginPath();
          ctx.moveTo(x, bbox.top);
          ctx.lineTo(x, bbox.top + bbox.height);
          ctx.stroke();
        }
      }
      ctx.restore();
    });
  }, [config]);
  return null;
}
