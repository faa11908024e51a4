S=$(date +%s); lap() { echo "== $1 $(( $(date +%s) - S )) s"; }
(timeout 60 python3 -m pytest -q tests/kernels/test_compile.py tests/test_kv_cache.py tests/asv_bench/test_launches.py -p no:cacheprovider > $OUT/pytest.txt 2>&1; echo "exit $?" >> $OUT/pytest.txt) &
timeout 100 python3 -m ci run --rounds 1 --keep /tmp/runs/p 2>&1 | tail -1; lap run
wait; tail -4 $OUT/pytest.txt
python3 - <<'P'
import json,glob
(f,)=glob.glob('/tmp/runs/*/records/*/*.json')
p=json.load(open(f)); print(p['started_at'],p['finished_at'],p['ceilings'])
for r in p['rows']:
    if r['status']!='skipped': print(r['params'][0][:58].ljust(58),r['status'],r['reason'] or '',r['timer'],r['latency_us'],r['flags'],r['wall_s'],r['timed_s'],r['launch_hash'],round(r['ceiling_fraction'] or 0,3))
P
cp /tmp/runs/p/records/*/*.json $OUT/process.json
timeout 190 python3 -m tests.planted.agreement timed $OUT/timed.json --rounds 2 2>&1 | tail -5; lap agreement
timeout $(( 500 - ($(date +%s) - S) )) python3 -m asv_bench.mutation --jobs 14 --json $OUT/mutation.json > $OUT/mutation.txt 2>&1; echo "exit $?" >> $OUT/mutation.txt; lap mutation
tail -2 $OUT/mutation.txt; grep -E "^(MISSED|ERROR)" $OUT/mutation.txt | head -20 | cut -c1-250
