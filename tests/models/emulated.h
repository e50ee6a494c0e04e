// CUDA on the CPU, for tests of kernels: the threads of a block are coroutines that pause at barriers.
// An asynchronous copy takes place as late as it may; fresh shared memory holds NaN.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <functional>
#include <vector>
#define EMULATED
#define __restrict__
#define DEVICE static inline
#define ANYWHERE
#define SHARED float* const sm = emulated::shared
#define KERNEL(threads, blocks) extern "C" void
#define FACTS extern "C" int
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct Index { int x; };
static thread_local Index threadIdx, blockIdx;
namespace emulated {
struct Copy { void* to; const void* from; int bytes; bool real; };
struct Thread { ucontext_t context; std::vector<char> stack; std::vector<std::vector<Copy>> groups; bool done; };
static float* shared;
static std::vector<Thread> threads;
static ucontext_t home;
static int now;
static std::function<void()> body;
static void main() { body(); threads[now].done = true; swapcontext(&threads[now].context, &home); }
static void pause() { int mine = now; swapcontext(&threads[now].context, &home); now = mine; threadIdx.x = mine; }
static void copied(int left) {
  auto& groups = threads[now].groups;
  while ((int)groups.size() - 1 > left) {
    for (auto& c : groups[0]) if (c.real) memcpy(c.to, c.from, c.bytes); else memset(c.to, 0, c.bytes);
    groups.erase(groups.begin());
  }
}
static int run(int blocks, int count, int bytes, std::function<void()> kernel) {
  std::vector<float> memory(bytes / 4 + 64 + 4);
  shared = memory.data();
  while ((size_t)shared % 16) shared++;
  body = kernel;
  for (int b = 0; b < blocks; b++) {
    for (auto& v : memory) v = NAN;
    threads.assign(count, {});
    for (int t = 0; t < count; t++) {
      auto& one = threads[t];
      one.stack.resize(1 << 16); one.groups.resize(1); one.done = false;
      getcontext(&one.context);
      one.context.uc_stack.ss_sp = one.stack.data(); one.context.uc_stack.ss_size = one.stack.size(); one.context.uc_link = nullptr;
      makecontext(&one.context, main, 0);
    }
    for (bool left = true; left;) {
      left = false;
      int paused = 0, done = 0;
      for (int t = 0; t < count; t++) {
        if (!threads[t].done) { now = t; threadIdx.x = t; blockIdx.x = b; swapcontext(&home, &threads[t].context); }
        threads[t].done ? done++ : paused++;
        left |= !threads[t].done;
      }
      if (paused && done) return 1;  // a barrier that some threads do not reach
    }
    for (int i = bytes / 4; i < bytes / 4 + 32; i++) if (!std::isnan(shared[i])) return 2;  // beyond its memory
  }
  return 0;
}
}  // namespace emulated
static void __syncthreads() { emulated::pause(); }
static void __syncwarp() { emulated::pause(); }
template <int BYTES> static void copy(void* s, const void* g, bool real = true) {
  if ((size_t)s % BYTES || (real && (size_t)g % BYTES)) abort();
  emulated::threads[emulated::now].groups.back().push_back({s, g, BYTES, real});
}
static void commit() { emulated::threads[emulated::now].groups.emplace_back(); }
template <int LEFT> static void arrived() { emulated::copied(LEFT); }
static unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
static float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
static unsigned uniform(unsigned x) { return x; }
static float pieces[1024][6];
static void multiply(float (&c)[4], const float (&a)[4], float b0, float b1) {
  const int t = threadIdx.x, first = t / 32 * 32, row = t % 32 / 4, col = t % 4 * 2;
  for (int i = 0; i < 4; i++) pieces[t][i] = a[i];
  pieces[t][4] = b0; pieces[t][5] = b1;
  emulated::pause();
  for (int k = 0; k < 8; k++)
    for (int i = 0; i < 4; i++)
      c[i] += pieces[first + row * 4 + k % 4][k / 4 * 2 + i / 2] * pieces[first + (col + i % 2) * 4 + k % 4][4 + k / 4];
  emulated::pause();
}
