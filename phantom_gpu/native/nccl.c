/* Collectives that do nothing and have always finished. */
int ncclGetVersion(int *version) {
  *version = 22907;
  return 0;
}
int ncclCommGetAsyncError(void *communicator, int *error) {
  *error = 0;
  return 0;
}
const char *ncclGetErrorString(int error) { return "phantom"; }
const char *ncclGetLastError(void *communicator) { return "phantom"; }

/* PyTorch waits until a new communicator is there. */
static int communicator;
struct id {
  char bytes[128];
};
int ncclCommInitRankConfig(void **made, int ranks, struct id id, int rank, void *options) {
  *made = &communicator;
  return 0;
}
int ncclCommSplit(void *whole, int color, int key, void **made, void *options) {
  *made = &communicator;
  return 0;
}
