import time
import pytest
from tests.distributed import harness
def fn(rank, x):
    return harness.sum_over_ranks(rank + x), __name__
@pytest.mark.parametrize("n", [2,4,8,4,8])
def test_a(n):
    t=time.time()
    v = harness.run(fn, n, 0)
    print(v, time.time()-t)
    assert v[0][0] == n*(n-1)//2
