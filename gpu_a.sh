S=$(date +%s); lap() { echo "== $1 $(( $(date +%s) - S )) s"; }
(timeout 260 python3 -m asv_bench.mutation --jobs 10 --json $OUT/mutation.json > $OUT/mutation.txt 2>&1; echo "exit $?" >> $OUT/mutation.txt) &
(timeout 250 python3 -m pytest -q tests/kernels tests/modules tests/ops tests/test_kv_cache.py tests/asv_bench/test_launches.py -p no:cacheprovider > $OUT/pytest.txt 2>&1; echo "exit $?" >> $OUT/pytest.txt) &
wait; lap parallel
tail -3 $OUT/pytest.txt; tail -2 $OUT/mutation.txt; grep -E "^(MISSED|ERROR)" $OUT/mutation.txt | head -30
timeout 80 python3 -m pytest -q -m gpu tests/asv_bench/test_microbench.py > $OUT/pytest-timers.txt 2>&1; tail -30 $OUT/pytest-timers.txt; lap timers
timeout 200 python3 -m ci run --keep /tmp/runs/boot1-1 2>&1 | tail -3; lap run
tar czf $OUT/runs.tgz -C /tmp runs
python3 - <<'P'
import json,glob,statistics as st
P=[json.load(open(f)) for f in sorted(glob.glob('/tmp/runs/*/records/*/*.json'))]
for p in P: print(p['started_at'],p['finished_at'],p['ceilings'])
for r in P[0]['rows']:
    v=[next(q for q in p['rows'] if q['params']==r['params'] and q['benchmark']==r['benchmark']) for p in P]
    l=[q['latency_us'] for q in v]
    if None in l:
        if v[0]['status']!='skipped': print(r['params'],[q['status'] for q in v],[q['reason'] for q in v])
        continue
    print(r['params'][0][:60].ljust(60),v[0]['timer'],[round(x,2) for x in l],'cv %.2f'%(100*st.stdev(l)/st.mean(l)),[q['flags'] for q in v if q['flags']],v[0]['samples'],round(v[0]['floor_us'] or 0,2),round(v[0]['ceiling_fraction'] or 0,3))
P
