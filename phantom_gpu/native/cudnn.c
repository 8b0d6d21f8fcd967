/* cuDNN's version. Its plans cannot be imitated: phantom_gpu switches cuDNN's attention off. */
#include <stdlib.h>

size_t cudnnGetVersion(void) { return 92000; }
size_t cudnnGetCudartVersion(void) { return 13000; }
const char *cudnnGetErrorString(int status) { return "phantom"; }
